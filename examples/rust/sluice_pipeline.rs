//! Hand-written bindings: what a pipeline of stages in one process needs of the C ABI (capi/include/sluice).
#![allow(dead_code)]
use crate::sluice::{check, Tensor};
use std::os::raw::{c_char, c_void};
use std::{mem, ptr};

type Ptr = *const c_void;
growing!(CommConfig, sluice_comm_config_init, { next: Ptr, rank: i32, world_size: i32 });
growing!(PipelineConfig, sluice_pipeline_config_init, {
    next: Ptr, policy: *const c_char, partition: *const c_char, num_virtual: i32, placement: i32, weight_apart: i32,
    receives_ahead: i32, in_flight: i32, held: i32, in_flight_of: *const i32, memory_budget: u64, activation_bytes: *const u64,
    held_bytes: *const u64, num_replicas: i32, replica: i32, stage: i32, reserved: i32, has_experts: *const i32 });
growing!(PipelineBatch, sluice_pipeline_batch_init, { num_micro_batches: i32, forward_only: i32 });

#[repr(C)]
pub struct StageTensors {
    pub tensors: *const Tensor,
    pub num_tensors: i32,
    pub is_local: i32,
    pub word: u64,
}

#[repr(C)]
pub struct StageCall {
    pub struct_size: usize,
    pub virtual_stage: i32,
    pub micro_batch: i32,
    pub is_first: i32,
    pub is_last: i32,
    pub forward_only: i32,
    pub reserved: i32,
    pub input: *const StageTensors,
    pub output: *const StageTensors,
    pub output_grad: *const StageTensors,
}

#[repr(C)]
pub struct HostFailure {
    pub peer: i32,
    pub native_code: i32,
    pub message: [c_char; 512],
}

pub type Callback = extern "C" fn(*mut c_void, *const StageCall, *mut HostFailure) -> i32;
pub type ResultCallback = extern "C" fn(*mut c_void, *const StageCall, *mut StageTensors, *mut HostFailure) -> i32;

#[repr(C)]
pub struct PipelineCallbacks {
    pub struct_size: usize,
    pub load: Option<Callback>,
    pub forward: Option<ResultCallback>,
    pub loss: Option<Callback>,
    pub backward: Option<ResultCallback>,
    pub weight_grad: Option<Callback>,
    pub release: Option<extern "C" fn(*mut c_void, i32, i32, i32)>,
    pub is_interrupted: Option<extern "C" fn(*mut c_void) -> i32>,
}

extern "C" {
    fn sluice_local_group_create(world_size: i32, out: *mut *mut c_void) -> i32;
    fn sluice_local_group_destroy(group: *mut c_void);
    fn sluice_comm_create_local(group: *mut c_void, config: *const CommConfig, out: *mut *mut c_void) -> i32;
    fn sluice_comm_destroy(comm: *mut c_void);
    fn sluice_pipeline_create(config: *const PipelineConfig, comm: *mut c_void, callbacks: *const PipelineCallbacks,
        user: *mut c_void, out: *mut *mut c_void) -> i32;
    fn sluice_pipeline_run_batch(pipeline: *mut c_void, batch: *const PipelineBatch) -> i32;
    fn sluice_pipeline_destroy(pipeline: *mut c_void);
}

/// The first elements of the first tensor on an edge, which lie there until the callback's micro-batch is through.
pub fn floats<'a>(edge: *const StageTensors, count: usize) -> &'a [f32] {
    unsafe { std::slice::from_raw_parts((*(*edge).tensors).data as *const f32, count) }
}

/// The meeting place of ranks that are threads.
pub struct LocalGroup(*mut c_void);
unsafe impl Sync for LocalGroup {}
impl LocalGroup {
    pub fn new(world_size: i32) -> Result<LocalGroup, String> {
        let mut group = ptr::null_mut();
        check(unsafe { sluice_local_group_create(world_size, &mut group) }).map(|_| LocalGroup(group))
    }
}
impl Drop for LocalGroup {
    fn drop(&mut self) { unsafe { sluice_local_group_destroy(self.0) } }
}

/// One stage on its rank. What `user` points to outlives it.
pub struct Pipeline { pipeline: *mut c_void, comm: *mut c_void }
impl Pipeline {
    pub fn new(group: &LocalGroup, rank: i32, world_size: i32, callbacks: &PipelineCallbacks, user: *mut c_void)
        -> Result<Pipeline, String> {
        let mut config = CommConfig::new();
        (config.rank, config.world_size) = (rank, world_size);
        let mut made = Pipeline { pipeline: ptr::null_mut(), comm: ptr::null_mut() };
        check(unsafe { sluice_comm_create_local(group.0, &config, &mut made.comm) })?;
        let config = PipelineConfig::new();
        check(unsafe { sluice_pipeline_create(&config, made.comm, callbacks, user, &mut made.pipeline) }).map(|_| made)
    }
    pub fn run_batch(&mut self, num_micro_batches: i32) -> Result<(), String> {
        let mut batch = PipelineBatch::new();
        batch.num_micro_batches = num_micro_batches;
        check(unsafe { sluice_pipeline_run_batch(self.pipeline, &batch) })
    }
}
impl Drop for Pipeline {
    fn drop(&mut self) { unsafe { sluice_pipeline_destroy(self.pipeline); sluice_comm_destroy(self.comm) } }
}
