//! The C ABI of Sluice. Written by capi/bindings/generate.py: do not edit.
//!
//! Names, contracts and lifetimes are those of the headers in capi/include/sluice. A struct's `default()` is what its
//! `_init` writes; where there is none it is zeros, and its size. Rust 1.63 or newer.
#![allow(dead_code, non_camel_case_types)]
use std::os::raw::{c_char, c_void};
use std::{ffi::CStr, fmt, mem, ptr};

pub const SLUICE_VERSION_MAJOR: i32 = 0;
pub const SLUICE_VERSION_MINOR: i32 = 1;
pub const SLUICE_VERSION_PATCH: i32 = 0;
pub const SLUICE_OK: i32 = 0;
pub const SLUICE_E_INVALID_ARGUMENT: i32 = -1;
pub const SLUICE_E_ABI: i32 = -2;
pub const SLUICE_E_NO_MEMORY: i32 = -3;
pub const SLUICE_E_BUSY: i32 = -4;
pub const SLUICE_E_UNSUPPORTED: i32 = -5;
pub const SLUICE_E_NOT_FOUND: i32 = -6;
pub const SLUICE_E_STATE: i32 = -7;
pub const SLUICE_E_MISMATCH: i32 = -8;
pub const SLUICE_E_PEER_REFUSED: i32 = -9;
pub const SLUICE_E_PEER_LOST: i32 = -10;
pub const SLUICE_E_TIMED_OUT: i32 = -11;
pub const SLUICE_E_ABORTED: i32 = -12;
pub const SLUICE_E_EXTERNAL: i32 = -13;
pub const SLUICE_E_OVER_BUDGET: i32 = -14;
pub const SLUICE_E_INTERNAL: i32 = -15;
pub const SLUICE_E_CAPACITY: i32 = -16;
pub const SLUICE_LOG_ERROR: i32 = 0;
pub const SLUICE_LOG_WARN: i32 = 1;
pub const SLUICE_LOG_INFO: i32 = 2;
pub const SLUICE_LOG_DEBUG: i32 = 3;
pub const SLUICE_TYPE_INT: i32 = 0;
pub const SLUICE_TYPE_UINT: i32 = 1;
pub const SLUICE_TYPE_FLOAT: i32 = 2;
pub const SLUICE_TYPE_BFLOAT: i32 = 4;
pub const SLUICE_DEVICE_CPU: i32 = 1;
pub const SLUICE_DEVICE_CUDA: i32 = 2;
pub const SLUICE_DTYPE_F32: i32 = 1;
pub const SLUICE_DTYPE_BF16: i32 = 2;
pub const SLUICE_DTYPE_F16: i32 = 3;
pub const SLUICE_DTYPE_F64: i32 = 4;
pub const SLUICE_DTYPE_I32: i32 = 5;
pub const SLUICE_DTYPE_I64: i32 = 6;
pub const SLUICE_NCCL_ID_BYTES: i32 = 128;
pub const SLUICE_WIRE_LAYER_DTYPE: i32 = 0;
pub const SLUICE_WIRE_BF16: i32 = 1;
pub const SLUICE_WIRE_INT8: i32 = 2;
pub const SLUICE_LANE_COMPUTE: i32 = 0;
pub const SLUICE_LANE_COMM: i32 = 1;
pub const SLUICE_LANE_COPY_OUT: i32 = 2;
pub const SLUICE_LANE_COPY_IN: i32 = 3;
pub const SLUICE_FORWARD: i32 = 0;
pub const SLUICE_BACKWARD: i32 = 1;
pub const SLUICE_SCORE_SOFTMAX: i32 = 0;
pub const SLUICE_SCORE_SIGMOID: i32 = 1;
pub const SLUICE_DROP_NONE: i32 = 0;
pub const SLUICE_DROP_POSITION: i32 = 1;
pub const SLUICE_DROP_SCORE: i32 = 2;
pub const SLUICE_MIGRATION_NONE: i32 = 0;
pub const SLUICE_MIGRATION_STREAMS: i32 = 1;
pub const SLUICE_MIGRATION_FLUSHES: i32 = 2;
pub const SLUICE_MIGRATION_READY: i32 = 3;
pub const SLUICE_MIGRATION_AGREED: i32 = 4;
pub const SLUICE_MIGRATION_UNDECIDED: i32 = 5;
pub const SLUICE_MIGRATION_COMMITTED: i32 = 6;
pub const SLUICE_MIGRATION_ABORTED: i32 = 7;
pub const SLUICE_MIGRATION_LEAVES: i32 = 0;
pub const SLUICE_MIGRATION_ARRIVES: i32 = 1;
pub const SLUICE_MIGRATION_STILL: i32 = 0;
pub const SLUICE_MIGRATION_AT_COMMIT: i32 = 1;
pub const SLUICE_ACTIVATION_IDENTITY: i32 = 0;
pub const SLUICE_ACTIVATION_RELU: i32 = 1;
pub const SLUICE_ACTIVATION_GELU: i32 = 2;
pub const SLUICE_ACTIVATION_GELU_TANH: i32 = 3;
pub const SLUICE_ACTIVATION_SILU: i32 = 4;
pub const SLUICE_ACTIVATION_RELU2: i32 = 5;
pub const SLUICE_ACTIVATION_SWIGLU: i32 = 6;
pub const SLUICE_GATED_NO: i32 = 0;
pub const SLUICE_GATED_HALVES: i32 = 1;
pub const SLUICE_GATED_INTERLEAVED: i32 = 2;
pub const SLUICE_WGRAD_ADAPTIVE: i32 = -1;
pub const SLUICE_WGRAD_DEFERRED: i32 = 0;
pub const SLUICE_WGRAD_PER_CHUNK: i32 = 1;
pub const SLUICE_RESTORE_ADAPTIVE: i32 = -1;
pub const SLUICE_RESTORE_KEEP: i32 = 0;
pub const SLUICE_RESTORE_OFFLOAD: i32 = 1;
pub const SLUICE_RESTORE_REDISPATCH: i32 = 2;
pub const SLUICE_RESTORE_RECOMPUTE: i32 = 3;
pub const SLUICE_RESTORE_BY_CHUNK: i32 = 255;
pub const SLUICE_CHUNKING_ADAPTIVE: i32 = 0;
pub const SLUICE_CHUNKING_TOKENS: i32 = 1;
pub const SLUICE_GROUPING_ADAPTIVE: i32 = 0;
pub const SLUICE_GROUPING_OFF: i32 = 1;
pub const SLUICE_GROUPING_ON: i32 = 2;
pub const SLUICE_EXCHANGE_EXACT: i32 = 0;
pub const SLUICE_EXCHANGE_CAPACITY: i32 = 1;
pub const SLUICE_DEDUPLICATE_NONE: i32 = 0;
pub const SLUICE_DEDUPLICATE_RANKS: i32 = 1;
pub const SLUICE_DEDUPLICATE_NODES: i32 = 2;
pub const SLUICE_DEDUPLICATE_ADAPTIVE: i32 = 3;
pub const SLUICE_SAVED_META: i32 = 0;
pub const SLUICE_SAVED_INPUT: i32 = 1;
pub const SLUICE_SAVED_PRE_ACTIVATION: i32 = 2;
pub const SLUICE_SAVED_HOST_INPUT: i32 = 3;
pub const SLUICE_SAVED_HOST_PRE_ACTIVATION: i32 = 4;
pub const SLUICE_SAVED_COUNT: i32 = 5;
pub const SLUICE_GRAD_OVERWRITE: i32 = 0;
pub const SLUICE_GRAD_ACCUMULATE: i32 = 1;
pub const SLUICE_BACKWARD_DGRAD: i32 = 1;
pub const SLUICE_BACKWARD_WGRAD: i32 = 2;
pub const SLUICE_BACKWARD_BOTH: i32 = 3;
pub const SLUICE_STAGE_OUTPUT: i32 = 0;
pub const SLUICE_STAGE_INPUT_GRAD: i32 = 1;
pub const SLUICE_PIPELINE_LOOPED: i32 = 0;
pub const SLUICE_PIPELINE_V: i32 = 1;
pub const SLUICE_PIPELINE_MAX_NOTE: i32 = 1024;
pub const SLUICE_PIPELINE_MEASURED: i32 = 0;
pub const SLUICE_PIPELINE_PREDICTED: i32 = 1;
pub const SLUICE_LAYER_MOVE_UPPER: i32 = 0;
pub const SLUICE_LAYER_MOVE_LOWER: i32 = 1;
pub const SLUICE_LAYER_MOVE_RAN: i32 = 1;
pub const SLUICE_LAYER_MOVE_HAS: i32 = 2;
pub const SLUICE_MOVE_PAYS: i32 = 0;
pub const SLUICE_MOVE_NO_GAIN: i32 = 1;
pub const SLUICE_MOVE_SMALL: i32 = 2;
pub const SLUICE_MOVE_TOO_SOON: i32 = 3;
pub const SLUICE_MOVE_COSTS_MORE: i32 = 4;
pub const SLUICE_PLANNER_CHOSEN: i32 = 0;
pub const SLUICE_PLANNER_SLOWER: i32 = 1;
pub const SLUICE_PLANNER_OVER_BUDGET: i32 = 2;
pub const SLUICE_PLANNER_EQUAL: i32 = 3;
pub const SLUICE_PLANNER_OVER_HOST_BUDGET: i32 = 4;
pub const SLUICE_WGRAD_CALL_NONE: i32 = 0;
pub const SLUICE_WGRAD_CALL_NOW: i32 = 1;
pub const SLUICE_WGRAD_CALL_LATER: i32 = 2;
pub const SLUICE_SCHEDULE_LANES: i32 = 4;
pub const SLUICE_STAGES_KEEP: i32 = 0;
pub const SLUICE_STAGES_RECOMPUTE: i32 = 1;
pub const SLUICE_STAGES_OFFLOAD: i32 = 2;
pub const SLUICE_STAGES_MIXED: i32 = 3;
pub const SLUICE_STAGES_1F1B: i32 = 0;
pub const SLUICE_STAGES_GPIPE: i32 = 1;
pub const SLUICE_STAGES_MESSAGE_DRIVEN: i32 = 2;
pub const SLUICE_STAGES_AUTO: i32 = 0;
pub const SLUICE_STAGES_EXACT: i32 = 1;
pub const SLUICE_STAGES_HEURISTIC: i32 = 2;
pub const SLUICE_STAGES_UNCOARSENED: i32 = 3;
pub const SLUICE_STAGES_FASTEST: i32 = 0;
pub const SLUICE_STAGES_FREE: i32 = 1;
pub const SLUICE_STAGES_SAVES: i32 = 2;
pub const SLUICE_STAGES_UNBURDENS: i32 = 3;
pub const SLUICE_STAGES_NO_TIME: i32 = 4;
pub const SLUICE_STAGES_OVER_BUDGET: i32 = 5;
pub const SLUICE_TUNER_ADAPTIVE: i32 = 0;
pub const SLUICE_TUNER_PROFILE: i32 = 1;
pub const SLUICE_TUNER_MODEL: i32 = 2;
pub const SLUICE_WHY_NOTHING_YET: i32 = 0;
pub const SLUICE_WHY_ON_TRIAL: i32 = 1;
pub const SLUICE_WHY_INSIDE_RANGE: i32 = 2;
pub const SLUICE_WHY_ONE_LEFT: i32 = 3;
pub const SLUICE_WHY_RACED: i32 = 4;
pub const SLUICE_WHY_PREDICTED: i32 = 5;
pub const SLUICE_WHY_QUESTIONED: i32 = 6;
pub const SLUICE_WHY_IMPORTED: i32 = 7;

#[repr(C)]
pub struct sluice_comm_t {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct sluice_local_group_t {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct sluice_context_t {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct sluice_migration_t {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct sluice_moe_t {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct sluice_step_t {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct sluice_optimizer_t {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct sluice_optimizer_file_t {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct sluice_pipeline_t {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct sluice_plan_t {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct sluice_planner_t {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct sluice_schedule_t {
    _opaque: [u8; 0],
}

#[repr(C)]
pub struct sluice_dispatch_t {
    _opaque: [u8; 0],
}

pub type sluice_log_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, level: i32, message: *const c_char)>;
pub type sluice_allocate_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, bytes: u64) -> *mut c_void>;
pub type sluice_free_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, data: *mut c_void, bytes: u64)>;
pub type sluice_host_comm_vtable_exchange_start_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, exchange: *const sluice_exchange_t, out_request: *mut *mut c_void, out_failure: *mut sluice_host_failure_t) -> i32>;
pub type sluice_host_comm_vtable_exchange_wait_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, request: *mut c_void, timeout_ns: u64, out_failure: *mut sluice_host_failure_t) -> i32>;
pub type sluice_host_comm_vtable_abort_fn_t = Option<unsafe extern "C" fn(user: *mut c_void)>;
pub type sluice_host_comm_vtable_publish_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, key: *const c_char, value: *const c_char)>;
pub type sluice_host_comm_vtable_lookup_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, key: *const c_char, out: *mut c_char, out_bytes: i32) -> i32>;
pub type sluice_host_comm_vtable_destroy_fn_t = Option<unsafe extern "C" fn(user: *mut c_void)>;
pub type sluice_host_comm_vtable_is_interrupted_fn_t = Option<unsafe extern "C" fn(user: *mut c_void) -> i32>;
pub type sluice_nccl_group_publish_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, key: *const c_char, value: *const c_char)>;
pub type sluice_nccl_group_lookup_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, key: *const c_char, out: *mut c_char, out_bytes: i32) -> i32>;
pub type sluice_host_gemm_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, args: *const sluice_host_gemm_args_t) -> i32>;
pub type sluice_expert_callbacks_forward_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, chunk: i32, local_expert: i32, rows: i64, x: *const c_void, y: *mut c_void) -> i32>;
pub type sluice_expert_callbacks_backward_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, chunk: i32, local_expert: i32, rows: i64, x: *const c_void, dy: *const c_void, dx: *mut c_void) -> i32>;
pub type sluice_save_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, which: i32, bytes: u64) -> *mut c_void>;
pub type sluice_expert_ready_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, local_expert: i32)>;
pub type sluice_pipeline_callbacks_load_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, call: *const sluice_stage_call_t, out_failure: *mut sluice_host_failure_t) -> i32>;
pub type sluice_pipeline_callbacks_forward_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, call: *const sluice_stage_call_t, out_result: *mut sluice_stage_tensors_t, out_failure: *mut sluice_host_failure_t) -> i32>;
pub type sluice_pipeline_callbacks_loss_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, call: *const sluice_stage_call_t, out_failure: *mut sluice_host_failure_t) -> i32>;
pub type sluice_pipeline_callbacks_backward_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, call: *const sluice_stage_call_t, out_result: *mut sluice_stage_tensors_t, out_failure: *mut sluice_host_failure_t) -> i32>;
pub type sluice_pipeline_callbacks_weight_grad_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, call: *const sluice_stage_call_t, out_failure: *mut sluice_host_failure_t) -> i32>;
pub type sluice_pipeline_callbacks_release_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, which: i32, virtual_stage: i32, micro_batch: i32)>;
pub type sluice_pipeline_callbacks_is_interrupted_fn_t = Option<unsafe extern "C" fn(user: *mut c_void) -> i32>;
pub type sluice_pipeline_callbacks_reduce_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, call: *const sluice_stage_call_t, out_failure: *mut sluice_host_failure_t) -> i32>;
pub type sluice_pipeline_workload_op_seconds_fn_t = Option<unsafe extern "C" fn(user: *mut c_void, op: *const c_char, virtual_stage: i32, micro_batch: i32, begin_seconds: f64, seconds: f64) -> f64>;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_error_info_t {
    pub struct_size: usize,
    pub status: i32,
    pub rank: i32,
    pub peer: i32,
    pub native_code: i32,
    pub message: [c_char; 1024],
}
impl Default for sluice_error_info_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_error_info_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_tensor_t {
    pub data: *mut c_void,
    pub device_type: i32,
    pub device_id: i32,
    pub ndim: i32,
    pub type_code: u8,
    pub type_bits: u8,
    pub type_lanes: u16,
    pub shape: *mut i64,
    pub strides: *mut i64,
    pub byte_offset: u64,
}
impl Default for sluice_tensor_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_ext_header_t {
    pub r#type: i32,
    pub reserved: i32,
    pub next: *const sluice_ext_header_t,
}
impl Default for sluice_ext_header_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_comm_config_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub rank: i32,
    pub world_size: i32,
    pub timeout_ns: u64,
    pub warn_ns: u64,
}
impl Default for sluice_comm_config_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_comm_config_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_exchange_t {
    pub send: *const *const c_void,
    pub send_bytes: *const u64,
    pub recv: *const *mut c_void,
    pub recv_bytes: *const u64,
}
impl Default for sluice_exchange_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_host_failure_t {
    pub peer: i32,
    pub native_code: i32,
    pub message: [c_char; 512],
}
impl Default for sluice_host_failure_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_host_comm_vtable_t {
    pub struct_size: usize,
    pub exchange_start: sluice_host_comm_vtable_exchange_start_fn_t,
    pub exchange_wait: sluice_host_comm_vtable_exchange_wait_fn_t,
    pub abort: sluice_host_comm_vtable_abort_fn_t,
    pub publish: sluice_host_comm_vtable_publish_fn_t,
    pub lookup: sluice_host_comm_vtable_lookup_fn_t,
    pub destroy: sluice_host_comm_vtable_destroy_fn_t,
    pub is_interrupted: sluice_host_comm_vtable_is_interrupted_fn_t,
}
impl Default for sluice_host_comm_vtable_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        it.struct_size = mem::size_of::<Self>();
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_nccl_group_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub device_id: i32,
    pub color: i32,
    pub id: *const c_void,
    pub parent: *mut c_void,
    pub library: *const c_char,
    pub store_user: *mut c_void,
    pub publish: sluice_nccl_group_publish_fn_t,
    pub lookup: sluice_nccl_group_lookup_fn_t,
}
impl Default for sluice_nccl_group_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_nccl_group_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_tcp_config_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub interfaces: *const c_char,
    pub connect_timeout_ns: u64,
}
impl Default for sluice_tcp_config_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_tcp_config_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_host_gemm_args_t {
    pub m: i64,
    pub n: i64,
    pub k: i64,
    pub a: *const c_void,
    pub b: *const c_void,
    pub c: *mut c_void,
    pub a_row_stride: i64,
    pub a_col_stride: i64,
    pub b_row_stride: i64,
    pub b_col_stride: i64,
    pub c_row_stride: i64,
    pub c_col_stride: i64,
    pub dtype_ab: i32,
    pub dtype_c: i32,
    pub beta: f32,
    pub reserved: i32,
}
impl Default for sluice_host_gemm_args_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_context_config_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub device_type: i32,
    pub device_id: i32,
    pub gemm: *const c_char,
    pub gemm_library: *const c_char,
    pub host_gemm: sluice_host_gemm_fn_t,
    pub host_gemm_user: *mut c_void,
    pub allocate: sluice_allocate_fn_t,
    pub release: sluice_free_fn_t,
    pub allocate_user: *mut c_void,
    pub memory_budget: u64,
    pub max_outstanding: i32,
    pub separate_wgrad: i32,
    pub host_memory_budget: u64,
    pub shared_memory_budget: u64,
    pub shared_host_memory_budget: u64,
    pub num_layers: i32,
    pub reserved: i32,
    pub ranks_per_node: i32,
    pub wire_dtype: i32,
}
impl Default for sluice_context_config_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_context_config_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_context_stats_t {
    pub struct_size: usize,
    pub current_bytes: u64,
    pub peak_bytes: u64,
    pub slot_bytes: u64,
    pub saved_bytes: u64,
    pub bytes_sent: u64,
    pub num_passes: u64,
    pub compute_ns: u64,
    pub comm_ns: u64,
    pub comm_cpu_ns: u64,
    pub pass_ns: u64,
    pub last_num_chunks: i32,
    pub last_is_settled: i32,
    pub gemm: [c_char; 64],
    pub num_walks: u64,
    pub bind_cpu_ns: u64,
    pub walk_cpu_ns: u64,
    pub wait_ns: u64,
    pub num_wakes: u64,
    pub wake_cpu_ns: u64,
    pub num_readings: u64,
    pub readings_cpu_ns: u64,
    pub num_pool_allocations: u64,
    pub idle_pool_bytes: u64,
    pub num_fallback_chunks: u64,
    pub num_outstanding: u64,
    pub most_outstanding: u64,
    pub planned_outstanding: u64,
}
impl Default for sluice_context_stats_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        it.struct_size = mem::size_of::<Self>();
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_trace_event_t {
    pub begin_ns: u64,
    pub end_ns: u64,
    pub op: *const c_char,
    pub layer: i32,
    pub chunk: i32,
    pub lane: i32,
    pub direction: i32,
    pub bytes: u64,
}
impl Default for sluice_trace_event_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_gate_config_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub num_experts: i32,
    pub top_k: i32,
    pub score: i32,
    pub renormalize: i32,
    pub num_groups: i32,
    pub top_groups: i32,
    pub group_score_top: i32,
    pub drop_policy: i32,
    pub capacity: i64,
    pub capacity_factor: f32,
    pub scaling: f32,
    pub min_capacity: i64,
}
impl Default for sluice_gate_config_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_gate_config_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_migration_config_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub epoch: u64,
    pub bytes_per_second: u64,
    pub staging_bytes: u64,
    pub chunk_bytes: u64,
    pub gives_way: i32,
    pub reserved: i32,
}
impl Default for sluice_migration_config_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_migration_config_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_migration_span_t {
    pub data: *mut c_void,
    pub bytes: u64,
    pub when: i32,
    pub reserved: i32,
}
impl Default for sluice_migration_span_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_migration_item_t {
    pub id: u64,
    pub peer: i32,
    pub direction: i32,
    pub spans: *const sluice_migration_span_t,
    pub num_spans: i32,
    pub reserved: i32,
}
impl Default for sluice_migration_item_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_migration_progress_t {
    pub struct_size: usize,
    pub epoch: u64,
    pub target: u64,
    pub leaving_bytes: u64,
    pub arriving_bytes: u64,
    pub hidden_bytes: u64,
    pub staged_bytes: u64,
    pub peak_staged_bytes: u64,
    pub commit_seconds: f64,
    pub phase: i32,
    pub reserved: i32,
}
impl Default for sluice_migration_progress_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        it.struct_size = mem::size_of::<Self>();
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_moe_config_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub model_width: i64,
    pub hidden_width: i64,
    pub num_experts: i32,
    pub top_k: i32,
    pub dtype: i32,
    pub activation: i32,
    pub gated: i32,
    pub bias: i32,
    pub num_chunks: i32,
    pub wgrad_mode: i32,
    pub callback_experts: i32,
    pub layer_id: i32,
    pub expert_rank: *const i32,
    pub restore_input: i32,
    pub restore_pre_activation: i32,
    pub swiglu_alpha: f32,
    pub swiglu_limit: f32,
    pub swiglu_offset: f32,
    pub grouping: i32,
    pub exchange_mode: i32,
    pub chunking: i32,
    pub capacity_rows: i64,
    pub deduplicate: i32,
    pub reuse: i32,
    pub restore_input_of: *const i32,
    pub restore_pre_activation_of: *const i32,
    pub expert_slot: *const i32,
}
impl Default for sluice_moe_config_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_moe_config_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_expert_placement_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub expert_rank: *const i32,
    pub expert_slot: *const i32,
    pub epoch: u64,
}
impl Default for sluice_expert_placement_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_expert_placement_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_expert_tensors_t {
    pub struct_size: usize,
    pub w1: *const sluice_tensor_t,
    pub w3: *const sluice_tensor_t,
    pub w2: *const sluice_tensor_t,
    pub b1: *const sluice_tensor_t,
    pub b3: *const sluice_tensor_t,
    pub b2: *const sluice_tensor_t,
}
impl Default for sluice_expert_tensors_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        it.struct_size = mem::size_of::<Self>();
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_expert_callbacks_t {
    pub struct_size: usize,
    pub user: *mut c_void,
    pub forward: sluice_expert_callbacks_forward_fn_t,
    pub backward: sluice_expert_callbacks_backward_fn_t,
}
impl Default for sluice_expert_callbacks_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        it.struct_size = mem::size_of::<Self>();
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_moe_forward_args_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub tokens: *const sluice_tensor_t,
    pub expert_ids: *const sluice_tensor_t,
    pub route_weights: *const sluice_tensor_t,
    pub params: *const sluice_expert_tensors_t,
    pub callbacks: *const sluice_expert_callbacks_t,
    pub out_tokens: *const sluice_tensor_t,
    pub save: sluice_save_fn_t,
    pub save_user: *mut c_void,
    pub needs_backward: i32,
    pub local_status: i32,
    pub local_message: *const c_char,
    pub save_is_counted: i32,
    pub repeats: i32,
}
impl Default for sluice_moe_forward_args_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_moe_forward_args_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_moe_backward_args_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub tokens: *const sluice_tensor_t,
    pub route_weights: *const sluice_tensor_t,
    pub params: *const sluice_expert_tensors_t,
    pub callbacks: *const sluice_expert_callbacks_t,
    pub grad_out: *const sluice_tensor_t,
    pub grad_tokens: *const sluice_tensor_t,
    pub grad_route_weights: *const sluice_tensor_t,
    pub grad_params: *const sluice_expert_tensors_t,
    pub grad_mode: i32,
    pub parts: i32,
    pub expert_ready: sluice_expert_ready_fn_t,
    pub expert_ready_user: *mut c_void,
    pub local_status: i32,
    pub may_reuse_saved: i32,
    pub local_message: *const c_char,
}
impl Default for sluice_moe_backward_args_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_moe_backward_args_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_capacity_report_t {
    pub struct_size: usize,
    pub num_forwards: i64,
    pub num_routes: i64,
    pub num_dropped: i64,
    pub most_rows: i64,
    pub bad_route: i64,
    pub most_expert: i32,
    pub reserved: i32,
}
impl Default for sluice_capacity_report_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_capacity_report_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_optimizer_config_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub context: *mut sluice_context_t,
    pub device_bucket: i64,
    pub device_num_slots: i32,
    pub reserved: i32,
}
impl Default for sluice_optimizer_config_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_optimizer_config_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_optimizer_tensor_t {
    pub count: i64,
    pub step: i64,
    pub param: *mut c_void,
    pub master: *mut f32,
    pub grad: *const c_void,
    pub exp_avg: *mut f32,
    pub exp_avg_sq: *mut f32,
    pub param_dtype: i32,
    pub grad_dtype: i32,
}
impl Default for sluice_optimizer_tensor_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_optimizer_group_t {
    pub struct_size: usize,
    pub tensors: *const sluice_optimizer_tensor_t,
    pub num_tensors: i64,
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub epsilon: f64,
    pub weight_decay: f64,
    pub decoupled: i32,
    pub bias_correction: i32,
    pub maximize: i32,
    pub reserved: i32,
    pub comm: *mut sluice_comm_t,
}
impl Default for sluice_optimizer_group_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_optimizer_group_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_optimizer_step_args_t {
    pub struct_size: usize,
    pub groups: *const *const sluice_optimizer_group_t,
    pub num_groups: i64,
    pub loss_scale: f64,
    pub max_norm: f64,
    pub check_finite: i32,
    pub reserved: i32,
    pub comm: *mut sluice_comm_t,
    pub bucket: i64,
    pub sum_buckets: i64,
    pub file: *mut sluice_optimizer_file_t,
    pub stream: *mut c_void,
}
impl Default for sluice_optimizer_step_args_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_optimizer_step_args_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_optimizer_step_result_t {
    pub struct_size: usize,
    pub norm: f64,
    pub skipped: i32,
    pub decided: i32,
    pub sum_buckets: i64,
    pub staging_bytes: u64,
    pub sum_ns: u64,
    pub update_ns: u64,
    pub step_ns: u64,
    pub read_ns: u64,
    pub write_ns: u64,
}
impl Default for sluice_optimizer_step_result_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_optimizer_step_result_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_optimizer_file_config_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub path: *const c_char,
    pub step: i64,
    pub durable: i32,
    pub reserved: i32,
    pub comm: *mut sluice_comm_t,
    pub rank: i32,
    pub world_size: i32,
    pub groups: *const *const sluice_optimizer_group_t,
    pub num_groups: i64,
    pub num_dims: *const i32,
    pub dims: *const i64,
    pub replaces: i32,
    pub reserved2: i32,
}
impl Default for sluice_optimizer_file_config_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_optimizer_file_config_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_optimizer_file_info_t {
    pub struct_size: usize,
    pub count: i64,
    pub step: i64,
    pub other_step: i64,
    pub unfinished_step: i64,
    pub bytes: u64,
}
impl Default for sluice_optimizer_file_info_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_optimizer_file_info_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_optimizer_workload_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub count: i64,
    pub bucket: i64,
    pub sum_buckets: i64,
    pub param_dtype: i32,
    pub grad_dtype: i32,
    pub num_slots: i32,
    pub world_size: i32,
    pub decides: i32,
    pub sums_on_device: i32,
    pub update_rate: f64,
    pub copy_in_rate: f64,
    pub copy_out_rate: f64,
    pub sum_rate: f64,
    pub sum_seconds: f64,
}
impl Default for sluice_optimizer_workload_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_optimizer_workload_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_optimizer_prediction_t {
    pub struct_size: usize,
    pub param_bytes: u64,
    pub grad_bytes: u64,
    pub slot_bytes: u64,
    pub staging_bytes: u64,
    pub near_bytes: u64,
    pub state_bytes: u64,
    pub file_bytes: u64,
    pub whole_bytes: u64,
    pub sum_buckets: i64,
    pub seconds: f64,
    pub seconds_by_k: [f64; 4],
    pub update_seconds: f64,
    pub copy_in_seconds: f64,
    pub copy_out_seconds: f64,
    pub sum_seconds: f64,
}
impl Default for sluice_optimizer_prediction_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_optimizer_prediction_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_stage_tensors_t {
    pub tensors: *const sluice_tensor_t,
    pub num_tensors: i32,
    pub is_local: i32,
    pub word: u64,
}
impl Default for sluice_stage_tensors_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_stage_call_t {
    pub struct_size: usize,
    pub virtual_stage: i32,
    pub micro_batch: i32,
    pub is_first: i32,
    pub is_last: i32,
    pub forward_only: i32,
    pub reserved: i32,
    pub input: *const sluice_stage_tensors_t,
    pub output: *const sluice_stage_tensors_t,
    pub output_grad: *const sluice_stage_tensors_t,
}
impl Default for sluice_stage_call_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        it.struct_size = mem::size_of::<Self>();
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_pipeline_callbacks_t {
    pub struct_size: usize,
    pub load: sluice_pipeline_callbacks_load_fn_t,
    pub forward: sluice_pipeline_callbacks_forward_fn_t,
    pub loss: sluice_pipeline_callbacks_loss_fn_t,
    pub backward: sluice_pipeline_callbacks_backward_fn_t,
    pub weight_grad: sluice_pipeline_callbacks_weight_grad_fn_t,
    pub release: sluice_pipeline_callbacks_release_fn_t,
    pub is_interrupted: sluice_pipeline_callbacks_is_interrupted_fn_t,
    pub reduce: sluice_pipeline_callbacks_reduce_fn_t,
}
impl Default for sluice_pipeline_callbacks_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        it.struct_size = mem::size_of::<Self>();
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_pipeline_config_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub policy: *const c_char,
    pub partition: *const c_char,
    pub num_virtual: i32,
    pub placement: i32,
    pub weight_apart: i32,
    pub receives_ahead: i32,
    pub in_flight: i32,
    pub held: i32,
    pub in_flight_of: *const i32,
    pub memory_budget: u64,
    pub activation_bytes: *const u64,
    pub held_bytes: *const u64,
    pub num_replicas: i32,
    pub replica: i32,
    pub stage: i32,
    pub reserved: i32,
    pub has_experts: *const i32,
}
impl Default for sluice_pipeline_config_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_pipeline_config_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_pipeline_batch_t {
    pub struct_size: usize,
    pub num_micro_batches: i32,
    pub forward_only: i32,
}
impl Default for sluice_pipeline_batch_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_pipeline_batch_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_pipeline_stats_t {
    pub struct_size: usize,
    pub num_batches: u64,
    pub num_failed: u64,
    pub batch_ns: u64,
    pub callback_ns: u64,
    pub wait_ns: u64,
    pub agree_ns: u64,
    pub messages_sent: u64,
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub peak_bytes: u64,
    pub planned_bytes: u64,
    pub most_message_bytes: u64,
    pub in_flight: i32,
    pub most_in_flight: i32,
    pub most_held: i32,
    pub is_chosen: i32,
    pub policy: *const c_char,
}
impl Default for sluice_pipeline_stats_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        it.struct_size = mem::size_of::<Self>();
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_stage_event_t {
    pub begin_ns: u64,
    pub end_ns: u64,
    pub op: *const c_char,
    pub virtual_stage: i32,
    pub micro_batch: i32,
    pub peer: i32,
    pub reserved: i32,
    pub bytes: u64,
}
impl Default for sluice_stage_event_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_layer_move_t {
    pub role: i32,
    pub to_lower: i32,
    pub has: i32,
    pub trigger: i32,
    pub num_open: i32,
    pub is_over: i32,
}
impl Default for sluice_layer_move_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_pipeline_workload_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub policy: *const c_char,
    pub num_stages: i32,
    pub num_virtual: i32,
    pub num_micro_batches: i32,
    pub placement: i32,
    pub weight_apart: i32,
    pub receives_ahead: i32,
    pub in_flight: i32,
    pub rendezvous: i32,
    pub forward_seconds: *const f64,
    pub backward_seconds: *const f64,
    pub weight_seconds: *const f64,
    pub message_seconds: *const f64,
    pub activation_bytes: *const u64,
    pub held_bytes: *const u64,
    pub memory_budget: *const u64,
    pub shares_cards: i32,
    pub reserved: i32,
    pub op_seconds: sluice_pipeline_workload_op_seconds_fn_t,
    pub user: *mut c_void,
    pub reduce_seconds: *const f64,
}
impl Default for sluice_pipeline_workload_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_pipeline_workload_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_stage_prediction_t {
    pub busy_seconds: f64,
    pub bubble: f64,
    pub planned_bytes: u64,
    pub peak_bytes: u64,
    pub in_flight: i32,
    pub most_in_flight: i32,
    pub most_held: i32,
    pub reserved: i32,
}
impl Default for sluice_stage_prediction_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_pipeline_prediction_t {
    pub struct_size: usize,
    pub seconds: f64,
    pub bubble: f64,
    pub in_flight: i32,
    pub is_chosen: i32,
    pub policy: *const c_char,
}
impl Default for sluice_pipeline_prediction_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        it.struct_size = mem::size_of::<Self>();
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_placement_problem_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub loads: *const u64,
    pub expert_rank: *const i32,
    pub expert_slot: *const i32,
    pub expert_bytes: *const u64,
    pub target: f64,
    pub num_experts: i32,
    pub num_ranks: i32,
}
impl Default for sluice_placement_problem_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_placement_problem_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_placement_result_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub expert_rank: *mut i32,
    pub expert_slot: *mut i32,
    pub mean_load: f64,
    pub load_before: u64,
    pub load: u64,
    pub bound_load: u64,
    pub moved_bytes: u64,
    pub num_moves: i32,
    pub is_optimal: i32,
}
impl Default for sluice_placement_result_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_placement_result_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_planner_move_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub step_seconds: f64,
    pub planned_step_seconds: f64,
    pub move_seconds: f64,
    pub horizon_steps: f64,
    pub least_gain: f64,
    pub steps_since_move: i64,
    pub least_steps: i64,
}
impl Default for sluice_planner_move_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_planner_move_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_plan_config_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub max_tokens: i64,
    pub memory_budget: u64,
    pub base_bytes: u64,
    pub max_outstanding: i32,
    pub num_chunks: i32,
    pub restore_input: i32,
    pub restore_pre_activation: i32,
    pub wgrad_mode: i32,
    pub separate_wgrad: i32,
    pub host_memory_budget: u64,
    pub restore_input_of: *const i32,
    pub restore_pre_activation_of: *const i32,
}
impl Default for sluice_plan_config_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_plan_config_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_plan_info_t {
    pub struct_size: usize,
    pub max_tokens: i64,
    pub chunk_rows: i64,
    pub kept_rows: i64,
    pub num_blocks: i32,
    pub num_chunks: i32,
    pub max_chunks: i32,
    pub restore_input: i32,
    pub restore_pre_activation: i32,
    pub wgrad_mode: i32,
    pub max_outstanding: i32,
    pub kept_chunks: i32,
    pub base_bytes: u64,
    pub slot_bytes: u64,
    pub routing_bytes: u64,
    pub schedule_bytes: u64,
    pub header_bytes: u64,
    pub gemm_bytes: u64,
    pub step_bytes: u64,
    pub total_bytes: u64,
    pub relative_time: f64,
    pub host_pool_bytes: u64,
    pub communication_bytes: u64,
    pub saved_bytes: u64,
    pub deferred_bytes: u64,
    pub peak_slot_bytes: u64,
    pub peak_direction: i32,
    pub peak_op: [c_char; 28],
}
impl Default for sluice_plan_info_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        it.struct_size = mem::size_of::<Self>();
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_plan_candidate_t {
    pub num_chunks: i32,
    pub restore_input: i32,
    pub restore_pre_activation: i32,
    pub wgrad_mode: i32,
    pub total_bytes: u64,
    pub relative_time: f64,
    pub fits: i32,
    pub kept_chunks: i32,
}
impl Default for sluice_plan_candidate_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_paper_footprint_t {
    pub states: f64,
    pub activations: f64,
    pub temporaries: f64,
    pub pipelined_temporaries: f64,
    pub saving: f64,
    pub saved_share: f64,
}
impl Default for sluice_paper_footprint_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_calibration_config_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub model_width: i64,
    pub hidden_width: i64,
    pub seconds: f64,
    pub cache_dir: *const c_char,
    pub dtype: i32,
    pub refresh: i32,
}
impl Default for sluice_calibration_config_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_calibration_config_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_planner_workload_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub model_width: i64,
    pub hidden_width: i64,
    pub num_tokens: i64,
    pub memory_budget: u64,
    pub skew: f64,
    pub num_experts: i32,
    pub top_k: i32,
    pub world_size: i32,
    pub dtype: i32,
    pub gated: i32,
    pub callback_experts: i32,
    pub max_outstanding: i32,
    pub reserved: i32,
    pub host_memory_budget: u64,
    pub deduplicate: i32,
    pub chunking: i32,
    pub restore_input_of: *const i32,
    pub restore_pre_activation_of: *const i32,
    pub kept_chunks: i32,
    pub may_keep_part: i32,
    pub activation: i32,
    pub grouped: i32,
}
impl Default for sluice_planner_workload_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_planner_workload_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_planner_choice_t {
    pub num_chunks: i32,
    pub restore_input: i32,
    pub restore_pre_activation: i32,
    pub wgrad_mode: i32,
}
impl Default for sluice_planner_choice_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_planner_prediction_t {
    pub struct_size: usize,
    pub forward_seconds: f64,
    pub backward_seconds: f64,
    pub forward_busy: [f64; 4],
    pub backward_busy: [f64; 4],
    pub overhead_seconds: f64,
    pub mpmoe_forward_seconds: f64,
    pub mpmoe_backward_seconds: f64,
    pub mpipemoe_forward_seconds: f64,
    pub mpipemoe_backward_seconds: f64,
    pub machine_error_median: f64,
    pub machine_error_p90: f64,
    pub chunk_rows: i64,
    pub base_bytes: u64,
    pub slot_bytes: u64,
    pub routing_bytes: u64,
    pub schedule_bytes: u64,
    pub header_bytes: u64,
    pub gemm_bytes: u64,
    pub step_bytes: u64,
    pub total_bytes: u64,
    pub fits: i32,
    pub num_entries: i32,
    pub max_chunks: i32,
    pub run_chunks: i32,
    pub sent_rows: f64,
    pub kept_chunks: i32,
    pub reserved: i32,
}
impl Default for sluice_planner_prediction_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        it.struct_size = mem::size_of::<Self>();
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_planner_entry_t {
    pub begin_seconds: f64,
    pub end_seconds: f64,
    pub op: *const c_char,
    pub direction: i32,
    pub lane: i32,
    pub chunk: i32,
    pub index: i32,
}
impl Default for sluice_planner_entry_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_planner_candidate_t {
    pub choice: sluice_planner_choice_t,
    pub verdict: i32,
    pub kept_chunks: i32,
    pub forward_seconds: f64,
    pub backward_seconds: f64,
    pub slower_by: f64,
    pub total_bytes: u64,
    pub bytes_over: u64,
}
impl Default for sluice_planner_candidate_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_schedule_config_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub direction: i32,
    pub num_chunks: i32,
    pub single_rank: i32,
    pub needs_backward: i32,
    pub callback_experts: i32,
    pub gated: i32,
    pub dgrad: i32,
    pub wgrad: i32,
    pub wgrad_mode: i32,
    pub may_reuse_saved: i32,
    pub under_plan: i32,
    pub restore_input: i32,
    pub restore_pre_activation: i32,
    pub grouped: i32,
    pub restore_input_of: *const i32,
    pub restore_pre_activation_of: *const i32,
    pub deduplicate: i32,
    pub chunks_by_experts: i32,
}
impl Default for sluice_schedule_config_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_schedule_config_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_schedule_prediction_t {
    pub struct_size: usize,
    pub seconds: f64,
    pub busy_seconds: [f64; 4],
}
impl Default for sluice_schedule_prediction_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        it.struct_size = mem::size_of::<Self>();
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_stages_option_t {
    pub forward_seconds: f64,
    pub backward_seconds: f64,
    pub resident_bytes: u64,
    pub held_bytes: u64,
    pub copied_bytes: u64,
    pub working_bytes: u64,
    pub arena_bytes: u64,
    pub kind: i32,
    pub tag: i32,
}
impl Default for sluice_stages_option_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_stages_edge_t {
    pub from: i32,
    pub to: i32,
}
impl Default for sluice_stages_edge_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_stages_link_t {
    pub bytes_per_second: f64,
    pub latency_seconds: f64,
    pub full_duplex: i32,
    pub reserved: i32,
}
impl Default for sluice_stages_link_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_planner_layer_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub forward_seconds: f64,
    pub backward_seconds: f64,
    pub recompute_seconds: f64,
    pub activation_bytes: u64,
    pub checkpoint_bytes: u64,
    pub workspace_bytes: u64,
    pub parameter_bytes: u64,
    pub state_bytes: u64,
    pub output_bytes: u64,
    pub planner: *const sluice_planner_t,
    pub moe: *const sluice_planner_workload_t,
    pub wanted: *const sluice_planner_choice_t,
    pub options: *const sluice_stages_option_t,
    pub num_options: i32,
    pub may_recompute: i32,
    pub may_offload: i32,
    pub reserved: i32,
}
impl Default for sluice_planner_layer_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_planner_layer_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_planner_problem_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub layers: *const *const sluice_planner_layer_t,
    pub edges: *const sluice_stages_edge_t,
    pub links: *const sluice_stages_link_t,
    pub budget_bytes: *const u64,
    pub in_flight: *const i32,
    pub base_bytes: u64,
    pub copy_bytes_per_second: f64,
    pub num_layers: i32,
    pub num_edges: i32,
    pub num_stages: i32,
    pub num_micro_batches: i32,
    pub schedule: i32,
    pub in_flight_limit: i32,
    pub weight_versions: i32,
    pub copies_share_links: i32,
    pub method: i32,
    pub reserved: i32,
}
impl Default for sluice_planner_problem_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_planner_problem_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_stages_choice_t {
    pub stage: i32,
    pub kind: i32,
    pub option: i32,
    pub fastest: i32,
    pub reason: i32,
    pub reserved: i32,
    pub reason_bytes: u64,
    pub reason_seconds: f64,
}
impl Default for sluice_stages_choice_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_stages_other_cut_t {
    pub slowest_seconds: f64,
    pub short_bytes: u64,
    pub layer: i32,
    pub reserved: i32,
}
impl Default for sluice_stages_other_cut_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_stages_stage_t {
    pub seconds: f64,
    pub compute_seconds: f64,
    pub extra_seconds: f64,
    pub message_seconds: f64,
    pub copy_seconds: f64,
    pub bytes: u64,
    pub base_bytes: u64,
    pub parameter_bytes: u64,
    pub state_bytes: u64,
    pub message_bytes: u64,
    pub resident_bytes: u64,
    pub held_bytes: u64,
    pub working_bytes: u64,
    pub staging_bytes: u64,
    pub arena_bytes: u64,
    pub host_bytes: u64,
    pub peak_bytes: u64,
    pub budget_bytes: u64,
    pub in_flight: i32,
    pub num_layers: i32,
    pub begins_earlier: sluice_stages_other_cut_t,
    pub begins_later: sluice_stages_other_cut_t,
}
impl Default for sluice_stages_stage_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_planner_result_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub choices: *mut sluice_stages_choice_t,
    pub stages: *mut sluice_stages_stage_t,
    pub moe: *mut sluice_planner_candidate_t,
    pub text: *mut c_char,
    pub text_room: u64,
    pub text_bytes: u64,
    pub slowest_seconds: f64,
    pub step_seconds: f64,
    pub smallest_budget_bytes: u64,
    pub short_bytes: u64,
    pub slowest_stage: i32,
    pub blocking_stage: i32,
    pub is_optimal: i32,
    pub num_rounds: i32,
}
impl Default for sluice_planner_result_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_planner_result_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_tuner_config_t {
    pub struct_size: usize,
    pub next: *const sluice_ext_header_t,
    pub mode: i32,
    pub reserved: i32,
    pub machine: *const sluice_planner_t,
}
impl Default for sluice_tuner_config_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        unsafe { sluice_tuner_config_init(&mut it, mem::size_of::<Self>()) };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_tuner_decision_t {
    pub model_width: i64,
    pub hidden_width: i64,
    pub num_experts: i32,
    pub top_k: i32,
    pub dtype: i32,
    pub gated: i32,
    pub rows: i64,
    pub num_chunks: i32,
    pub wgrad_mode: i32,
    pub why: i32,
    pub num_raced: i32,
    pub race_passes: i64,
    pub seconds: f64,
    pub predicted_seconds: f64,
    pub runner_up_seconds: f64,
    pub runner_up_chunks: i32,
    pub runner_up_wgrad_mode: i32,
}
impl Default for sluice_tuner_decision_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_tuner_policy_t {
    pub restore_input: i32,
    pub restore_pre_activation: i32,
    pub runner_up_restore_input: i32,
    pub runner_up_restore_pre_activation: i32,
    pub memory_budget: u64,
    pub total_bytes: u64,
}
impl Default for sluice_tuner_policy_t {
    fn default() -> Self {
        let it: Self = unsafe { mem::zeroed() };
        it
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct sluice_tuner_stats_t {
    pub struct_size: usize,
    pub timed_passes: i64,
    pub race_passes: i64,
    pub num_decisions: i64,
    pub num_switches: i64,
    pub num_questioned: i64,
    pub num_changed: i64,
    pub monotonic: i64,
    pub not_monotonic: i64,
    pub total_seconds: f64,
    pub excess_seconds: f64,
    pub switch_seconds: f64,
    pub one_valley: i64,
    pub not_one_valley: i64,
}
impl Default for sluice_tuner_stats_t {
    fn default() -> Self {
        let mut it: Self = unsafe { mem::zeroed() };
        it.struct_size = mem::size_of::<Self>();
        it
    }
}

extern "C" {
    pub fn sluice_error_info_init(out_info: *mut sluice_error_info_t, struct_size: usize);
    pub fn sluice_error_last(out_info: *mut sluice_error_info_t);
    pub fn sluice_status_name(status: i32) -> *const c_char;
    pub fn sluice_version(out_major: *mut i32, out_minor: *mut i32, out_patch: *mut i32);
    pub fn sluice_build_info() -> *const c_char;
    pub fn sluice_set_log(r#fn: sluice_log_fn_t, user: *mut c_void, max_level: i32);
    pub fn sluice_comm_config_init(out_config: *mut sluice_comm_config_t, struct_size: usize);
    pub fn sluice_local_group_create(world_size: i32, out_group: *mut *mut sluice_local_group_t) -> i32;
    pub fn sluice_local_group_destroy(group: *mut sluice_local_group_t);
    pub fn sluice_comm_create_local(group: *mut sluice_local_group_t, config: *const sluice_comm_config_t, out_comm: *mut *mut sluice_comm_t) -> i32;
    pub fn sluice_comm_create_host(config: *const sluice_comm_config_t, vtable: *const sluice_host_comm_vtable_t, user: *mut c_void, out_comm: *mut *mut sluice_comm_t) -> i32;
    pub fn sluice_comm_create_mpi(config: *const sluice_comm_config_t, mpi_comm_f: i64, library: *const c_char, out_comm: *mut *mut sluice_comm_t) -> i32;
    pub fn sluice_nccl_group_init(out_group: *mut sluice_nccl_group_t, struct_size: usize);
    pub fn sluice_nccl_id_create(library: *const c_char, out_id: *mut c_void) -> i32;
    pub fn sluice_comm_create_nccl(config: *const sluice_comm_config_t, group: *const sluice_nccl_group_t, out_comm: *mut *mut sluice_comm_t) -> i32;
    pub fn sluice_tcp_config_init(out_config: *mut sluice_tcp_config_t, struct_size: usize);
    pub fn sluice_comm_create_tcp(parent: *mut sluice_comm_t, config: *const sluice_tcp_config_t, out_comm: *mut *mut sluice_comm_t) -> i32;
    pub fn sluice_comm_rank(comm: *const sluice_comm_t) -> i32;
    pub fn sluice_comm_world_size(comm: *const sluice_comm_t) -> i32;
    pub fn sluice_comm_name(comm: *const sluice_comm_t) -> *const c_char;
    pub fn sluice_comm_abort(comm: *mut sluice_comm_t);
    pub fn sluice_comm_destroy(comm: *mut sluice_comm_t);
    pub fn sluice_context_config_init(out_config: *mut sluice_context_config_t, struct_size: usize);
    pub fn sluice_context_create(config: *const sluice_context_config_t, comm: *mut sluice_comm_t, out_context: *mut *mut sluice_context_t) -> i32;
    pub fn sluice_context_destroy(context: *mut sluice_context_t);
    pub fn sluice_context_set_share(context: *mut sluice_context_t, memory_budget: u64, whole: u64) -> i32;
    pub fn sluice_context_allocate_saved(context: *mut sluice_context_t, which: i32, bytes: u64, out_data: *mut *mut c_void) -> i32;
    pub fn sluice_context_allocate(context: *mut sluice_context_t, bytes: u64, out_data: *mut *mut c_void) -> i32;
    pub fn sluice_context_free(context: *mut sluice_context_t, data: *mut c_void, bytes: u64);
    pub fn sluice_context_get_stats(context: *mut sluice_context_t, reset_peak: i32, out_stats: *mut sluice_context_stats_t) -> i32;
    pub fn sluice_context_trace(context: *mut sluice_context_t, capacity: i64) -> i32;
    pub fn sluice_context_take_trace(context: *mut sluice_context_t, out_events: *mut sluice_trace_event_t, capacity: i64, out_count: *mut i64) -> i32;
    pub fn sluice_gate_config_init(out_config: *mut sluice_gate_config_t, struct_size: usize);
    pub fn sluice_gate_forward(config: *const sluice_gate_config_t, logits: *const sluice_tensor_t, bias: *const sluice_tensor_t, expert_ids: *const sluice_tensor_t, route_weights: *const sluice_tensor_t, counts: *const sluice_tensor_t, out_aux_loss: *mut f32, out_z_loss: *mut f32) -> i32;
    pub fn sluice_gate_backward(config: *const sluice_gate_config_t, logits: *const sluice_tensor_t, bias: *const sluice_tensor_t, expert_ids: *const sluice_tensor_t, grad_route_weights: *const sluice_tensor_t, grad_aux_loss: f32, grad_z_loss: f32, grad_logits: *const sluice_tensor_t) -> i32;
    pub fn sluice_migration_config_init(out_config: *mut sluice_migration_config_t, struct_size: usize);
    pub fn sluice_migration_create(comm: *mut sluice_comm_t, config: *const sluice_migration_config_t, out_migration: *mut *mut sluice_migration_t) -> i32;
    pub fn sluice_migration_destroy(migration: *mut sluice_migration_t);
    pub fn sluice_migration_begin(migration: *mut sluice_migration_t, epoch: u64, items: *const sluice_migration_item_t, num_items: i32) -> i32;
    pub fn sluice_migration_read_early(migration: *mut sluice_migration_t, id: u64, peer: i32, to: *const sluice_migration_span_t, num_spans: i32, out_is_there: *mut i32) -> i32;
    pub fn sluice_migration_mark_still(migration: *mut sluice_migration_t, id: u64, peer: i32) -> i32;
    pub fn sluice_migration_commit(migration: *mut sluice_migration_t, refusal: *const c_char) -> i32;
    pub fn sluice_migration_settle(migration: *mut sluice_migration_t, comm: *mut sluice_comm_t, out_epoch: *mut u64) -> i32;
    pub fn sluice_migration_abort(migration: *mut sluice_migration_t, reason: *const c_char);
    pub fn sluice_migration_get_progress(migration: *mut sluice_migration_t, out_progress: *mut sluice_migration_progress_t) -> i32;
    pub fn sluice_migration_phase_name(phase: i32) -> *const c_char;
    pub fn sluice_restore_policies_json(text: *mut c_char, inout_bytes: *mut u64) -> i32;
    pub fn sluice_moe_config_init(out_config: *mut sluice_moe_config_t, struct_size: usize);
    pub fn sluice_moe_create(context: *mut sluice_context_t, config: *const sluice_moe_config_t, out_moe: *mut *mut sluice_moe_t) -> i32;
    pub fn sluice_moe_destroy(moe: *mut sluice_moe_t);
    pub fn sluice_moe_num_local_experts(moe: *const sluice_moe_t) -> i32;
    pub fn sluice_expert_placement_init(out_placement: *mut sluice_expert_placement_t, struct_size: usize);
    pub fn sluice_moe_replace_experts(moe: *mut sluice_moe_t, placement: *const sluice_expert_placement_t) -> i32;
    pub fn sluice_moe_get_placement(moe: *const sluice_moe_t, out_expert_rank: *mut i32, out_expert_slot: *mut i32, out_epoch: *mut u64) -> i32;
    pub fn sluice_moe_get_loads(moe: *const sluice_moe_t, out_expert_rows: *mut i64, out_rank_rows: *mut i64, out_num_forwards: *mut i64) -> i32;
    pub fn sluice_moe_forward_args_init(out_args: *mut sluice_moe_forward_args_t, struct_size: usize);
    pub fn sluice_moe_forward(moe: *mut sluice_moe_t, args: *const sluice_moe_forward_args_t, stream: *mut c_void, out_step: *mut *mut sluice_step_t) -> i32;
    pub fn sluice_step_drop(step: *mut sluice_step_t);
    pub fn sluice_step_restore(moe: *mut sluice_moe_t, saved: *const *mut c_void, saved_bytes: *const u64, out_step: *mut *mut sluice_step_t) -> i32;
    pub fn sluice_step_info(step: *const sluice_step_t, out_num_chunks: *mut i32, out_rows_per_expert: *mut i64) -> i32;
    pub fn sluice_moe_backward_args_init(out_args: *mut sluice_moe_backward_args_t, struct_size: usize);
    pub fn sluice_moe_backward(moe: *mut sluice_moe_t, step: *mut sluice_step_t, args: *const sluice_moe_backward_args_t, stream: *mut c_void) -> i32;
    pub fn sluice_capacity_report_init(out_report: *mut sluice_capacity_report_t, struct_size: usize);
    pub fn sluice_moe_take_capacity_report(moe: *mut sluice_moe_t, stream: *mut c_void, out_report: *mut sluice_capacity_report_t) -> i32;
    pub fn sluice_optimizer_config_init(out_config: *mut sluice_optimizer_config_t, struct_size: usize);
    pub fn sluice_optimizer_group_init(out_group: *mut sluice_optimizer_group_t, struct_size: usize);
    pub fn sluice_optimizer_step_args_init(out_args: *mut sluice_optimizer_step_args_t, struct_size: usize);
    pub fn sluice_optimizer_step_result_init(out_result: *mut sluice_optimizer_step_result_t, struct_size: usize);
    pub fn sluice_optimizer_create(config: *const sluice_optimizer_config_t, out_optimizer: *mut *mut sluice_optimizer_t) -> i32;
    pub fn sluice_optimizer_step(optimizer: *mut sluice_optimizer_t, args: *const sluice_optimizer_step_args_t, out_result: *mut sluice_optimizer_step_result_t) -> i32;
    pub fn sluice_optimizer_destroy(optimizer: *mut sluice_optimizer_t);
    pub fn sluice_optimizer_file_config_init(out_config: *mut sluice_optimizer_file_config_t, struct_size: usize);
    pub fn sluice_optimizer_file_create(config: *const sluice_optimizer_file_config_t, groups: *const *const sluice_optimizer_group_t, num_groups: i64, out_file: *mut *mut sluice_optimizer_file_t) -> i32;
    pub fn sluice_optimizer_file_open(config: *const sluice_optimizer_file_config_t, out_file: *mut *mut sluice_optimizer_file_t) -> i32;
    pub fn sluice_optimizer_file_load(file: *mut sluice_optimizer_file_t, groups: *const *const sluice_optimizer_group_t, num_groups: i64) -> i32;
    pub fn sluice_optimizer_file_info_init(out_info: *mut sluice_optimizer_file_info_t, struct_size: usize);
    pub fn sluice_optimizer_file_info(file: *mut sluice_optimizer_file_t, out_info: *mut sluice_optimizer_file_info_t) -> i32;
    pub fn sluice_optimizer_file_close(file: *mut sluice_optimizer_file_t);
    pub fn sluice_optimizer_workload_init(out_workload: *mut sluice_optimizer_workload_t, struct_size: usize);
    pub fn sluice_optimizer_prediction_init(out_prediction: *mut sluice_optimizer_prediction_t, struct_size: usize);
    pub fn sluice_optimizer_predict(workload: *const sluice_optimizer_workload_t, out_prediction: *mut sluice_optimizer_prediction_t) -> i32;
    pub fn sluice_pipeline_config_init(out_config: *mut sluice_pipeline_config_t, struct_size: usize);
    pub fn sluice_pipeline_create(config: *const sluice_pipeline_config_t, comm: *mut sluice_comm_t, callbacks: *const sluice_pipeline_callbacks_t, user: *mut c_void, out_pipeline: *mut *mut sluice_pipeline_t) -> i32;
    pub fn sluice_pipeline_destroy(pipeline: *mut sluice_pipeline_t);
    pub fn sluice_pipeline_batch_init(out_batch: *mut sluice_pipeline_batch_t, struct_size: usize);
    pub fn sluice_pipeline_run_batch(pipeline: *mut sluice_pipeline_t, batch: *const sluice_pipeline_batch_t) -> i32;
    pub fn sluice_pipeline_abort(pipeline: *mut sluice_pipeline_t);
    pub fn sluice_pipeline_keep(pipeline: *mut sluice_pipeline_t, received: *const sluice_stage_tensors_t, out_kept: *mut *mut c_void) -> i32;
    pub fn sluice_pipeline_give_back(kept: *mut c_void);
    pub fn sluice_pipeline_set_note(pipeline: *mut sluice_pipeline_t, numbers: *const f64, count: i32) -> i32;
    pub fn sluice_pipeline_get_note(pipeline: *mut sluice_pipeline_t, rank: i32, out_numbers: *mut f64, capacity: i32, out_count: *mut i32) -> i32;
    pub fn sluice_pipeline_get_stats(pipeline: *mut sluice_pipeline_t, out_stats: *mut sluice_pipeline_stats_t) -> i32;
    pub fn sluice_pipeline_get_events(pipeline: *mut sluice_pipeline_t, out_events: *mut sluice_stage_event_t, capacity: i64, out_count: *mut i64) -> i32;
    pub fn sluice_pipeline_timeline_json(pipeline: *mut sluice_pipeline_t, which: i32, text: *mut c_char, inout_bytes: *mut u64) -> i32;
    pub fn sluice_layer_move_begin(role: i32, to_lower: i32, out_move: *mut sluice_layer_move_t);
    pub fn sluice_layer_move_arrived(r#move: *mut sluice_layer_move_t);
    pub fn sluice_layer_move_heard(r#move: *mut sluice_layer_move_t, word: u64);
    pub fn sluice_layer_move_runs(r#move: *mut sluice_layer_move_t, micro_batch: i32, word: u64) -> i32;
    pub fn sluice_layer_move_activation_word(ran: i32) -> u64;
    pub fn sluice_layer_move_gradient_word(r#move: *const sluice_layer_move_t) -> u64;
    pub fn sluice_layer_move_ended(r#move: *mut sluice_layer_move_t);
    pub fn sluice_layer_move_is_final(r#move: *const sluice_layer_move_t) -> i32;
    pub fn sluice_layer_move_receives(r#move: *const sluice_layer_move_t) -> i32;
    pub fn sluice_pipeline_workload_init(out_workload: *mut sluice_pipeline_workload_t, struct_size: usize);
    pub fn sluice_pipeline_predict(workload: *const sluice_pipeline_workload_t, out_prediction: *mut sluice_pipeline_prediction_t, out_stages: *mut sluice_stage_prediction_t) -> i32;
    pub fn sluice_pipeline_policy_name(index: i32) -> *const c_char;
    pub fn sluice_placement_problem_init(out_problem: *mut sluice_placement_problem_t, struct_size: usize);
    pub fn sluice_placement_result_init(out_result: *mut sluice_placement_result_t, struct_size: usize);
    pub fn sluice_planner_placement(problem: *const sluice_placement_problem_t, inout_result: *mut sluice_placement_result_t) -> i32;
    pub fn sluice_planner_move_init(out_move: *mut sluice_planner_move_t, struct_size: usize);
    pub fn sluice_planner_move_verdict(r#move: *const sluice_planner_move_t, out_verdict: *mut i32) -> i32;
    pub fn sluice_plan_config_init(out_config: *mut sluice_plan_config_t, struct_size: usize);
    pub fn sluice_plan_create(moe: *mut sluice_moe_t, config: *const sluice_plan_config_t, out_plan: *mut *mut sluice_plan_t) -> i32;
    pub fn sluice_plan_destroy(plan: *mut sluice_plan_t);
    pub fn sluice_plan_get_info(plan: *const sluice_plan_t, out_info: *mut sluice_plan_info_t) -> i32;
    pub fn sluice_plan_candidates(plan: *const sluice_plan_t, out_candidates: *mut sluice_plan_candidate_t, capacity: i32, out_count: *mut i32) -> i32;
    pub fn sluice_plan_predict_step(plan: *const sluice_plan_t, num_chunks: i32, rows_per_chunk: *const i64, kept_chunks: i32, num_tokens: i64, num_sent: i64, out_bytes: *mut u64) -> i32;
    pub fn sluice_moe_use_plan(moe: *mut sluice_moe_t, plan: *const sluice_plan_t) -> i32;
    pub fn sluice_moe_smallest_budget(moe: *mut sluice_moe_t, num_tokens: i64, out_bytes: *mut u64) -> i32;
    pub fn sluice_plan_write(plan: *const sluice_plan_t, data: *mut c_void, inout_bytes: *mut u64) -> i32;
    pub fn sluice_plan_read(moe: *mut sluice_moe_t, data: *const c_void, bytes: u64, out_plan: *mut *mut sluice_plan_t) -> i32;
    pub fn sluice_paper_footprint(rows: i64, model_width: i64, hidden_width: i64, num_experts: i32, num_chunks: i32, out_footprint: *mut sluice_paper_footprint_t);
    pub fn sluice_planner_create(machine_json: *const c_char, length: u64, out_planner: *mut *mut sluice_planner_t) -> i32;
    pub fn sluice_planner_destroy(planner: *mut sluice_planner_t);
    pub fn sluice_planner_write_machine(planner: *const sluice_planner_t, text: *mut c_char, inout_bytes: *mut u64) -> i32;
    pub fn sluice_calibration_config_init(out_config: *mut sluice_calibration_config_t, struct_size: usize);
    pub fn sluice_planner_calibrate(context: *mut sluice_context_t, config: *const sluice_calibration_config_t, out_planner: *mut *mut sluice_planner_t) -> i32;
    pub fn sluice_planner_workload_init(out_workload: *mut sluice_planner_workload_t, struct_size: usize);
    pub fn sluice_planner_predict(planner: *const sluice_planner_t, workload: *const sluice_planner_workload_t, choice: *const sluice_planner_choice_t, out_prediction: *mut sluice_planner_prediction_t, out_entries: *mut sluice_planner_entry_t, capacity: i32) -> i32;
    pub fn sluice_planner_choose(planner: *const sluice_planner_t, workload: *const sluice_planner_workload_t, wanted: *const sluice_planner_choice_t, out_candidates: *mut sluice_planner_candidate_t, capacity: i32, out_count: *mut i32, out_chosen: *mut i32) -> i32;
    pub fn sluice_planner_verdict_name(verdict: i32) -> *const c_char;
    pub fn sluice_schedule_config_init(out_config: *mut sluice_schedule_config_t, struct_size: usize);
    pub fn sluice_schedule_create(config: *const sluice_schedule_config_t, out_schedule: *mut *mut sluice_schedule_t) -> i32;
    pub fn sluice_schedule_destroy(schedule: *mut sluice_schedule_t);
    pub fn sluice_schedule_num_ops(schedule: *const sluice_schedule_t) -> i32;
    pub fn sluice_schedule_json(schedule: *const sluice_schedule_t, text: *mut c_char, inout_bytes: *mut u64) -> i32;
    pub fn sluice_schedule_predict(schedule: *const sluice_schedule_t, op_seconds: *const f64, share: *const f64, out_begin: *mut f64, out_end: *mut f64, out_prediction: *mut sluice_schedule_prediction_t) -> i32;
    pub fn sluice_dispatch_forward(moe: *mut sluice_moe_t, tokens: *const sluice_tensor_t, expert_ids: *const sluice_tensor_t, stream: *mut c_void, out_dispatch: *mut *mut sluice_dispatch_t) -> i32;
    pub fn sluice_dispatch_rows(dispatch: *const sluice_dispatch_t, out_rows: *mut *mut c_void, out_num_rows: *mut i64, out_rows_per_expert: *mut i64) -> i32;
    pub fn sluice_dispatch_combine(dispatch: *mut sluice_dispatch_t, rows: *const c_void, route_weights: *const sluice_tensor_t, out_tokens: *const sluice_tensor_t, stream: *mut c_void) -> i32;
    pub fn sluice_dispatch_combine_backward(dispatch: *mut sluice_dispatch_t, rows: *const c_void, route_weights: *const sluice_tensor_t, grad_out: *const sluice_tensor_t, grad_rows: *mut c_void, grad_weight_rows: *mut f32, stream: *mut c_void) -> i32;
    pub fn sluice_dispatch_backward(dispatch: *mut sluice_dispatch_t, grad_input_rows: *const c_void, grad_weight_rows: *const f32, grad_tokens: *const sluice_tensor_t, grad_route_weights: *const sluice_tensor_t, stream: *mut c_void) -> i32;
    pub fn sluice_dispatch_destroy(dispatch: *mut sluice_dispatch_t);
    pub fn sluice_route(expert_ids: *const sluice_tensor_t, num_experts: i32, out_rows_per_expert: *mut i64, out_order: *mut i64) -> i32;
    pub fn sluice_experts_forward(moe: *mut sluice_moe_t, rows: *const c_void, rows_per_expert: *const i64, params: *const sluice_expert_tensors_t, pre: *mut c_void, out_rows: *mut c_void, stream: *mut c_void) -> i32;
    pub fn sluice_experts_backward(moe: *mut sluice_moe_t, rows: *const c_void, pre: *const c_void, rows_per_expert: *const i64, params: *const sluice_expert_tensors_t, grad_rows: *const c_void, grad_input_rows: *mut c_void, grad_params: *const sluice_expert_tensors_t, grad_mode: i32, stream: *mut c_void) -> i32;
    pub fn sluice_planner_layer_init(out_layer: *mut sluice_planner_layer_t, struct_size: usize);
    pub fn sluice_planner_problem_init(out_problem: *mut sluice_planner_problem_t, struct_size: usize);
    pub fn sluice_planner_result_init(out_result: *mut sluice_planner_result_t, struct_size: usize);
    pub fn sluice_planner_stages(problem: *const sluice_planner_problem_t, inout_result: *mut sluice_planner_result_t) -> i32;
    pub fn sluice_tuner_config_init(out_config: *mut sluice_tuner_config_t, struct_size: usize);
    pub fn sluice_context_tune(context: *mut sluice_context_t, config: *const sluice_tuner_config_t) -> i32;
    pub fn sluice_context_decisions(context: *mut sluice_context_t, out_decisions: *mut sluice_tuner_decision_t, capacity: i32, out_count: *mut i32) -> i32;
    pub fn sluice_context_decided_policies(context: *mut sluice_context_t, out_policies: *mut sluice_tuner_policy_t, capacity: i32, out_count: *mut i32) -> i32;
    pub fn sluice_context_decided_parts(context: *mut sluice_context_t, out_kept_chunks: *mut i32, capacity: i32, out_count: *mut i32) -> i32;
    pub fn sluice_context_tuner_stats(context: *mut sluice_context_t, out_stats: *mut sluice_tuner_stats_t) -> i32;
    pub fn sluice_context_write_decisions(context: *mut sluice_context_t, text: *mut c_char, inout_bytes: *mut u64) -> i32;
    pub fn sluice_context_read_decisions(context: *mut sluice_context_t, text: *const c_char, length: u64) -> i32;
    pub fn sluice_context_write_machine(context: *mut sluice_context_t, text: *mut c_char, inout_bytes: *mut u64) -> i32;
    pub fn sluice_tuner_why_name(why: i32) -> *const c_char;
}

/// What a call that failed says of itself.
#[derive(Debug, Clone)]
pub struct Error {
    pub status: i32,
    pub message: String,
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        let name = unsafe { CStr::from_ptr(sluice_status_name(self.status)) };
        write!(out, "{}: {}", name.to_string_lossy(), self.message)
    }
}

impl std::error::Error for Error {}

/// Turns the status of a call of this thread, the last one, into a result.
pub fn check(status: i32) -> Result<(), Error> {
    if status == SLUICE_OK {
        return Ok(());
    }
    let mut why = sluice_error_info_t::default();
    unsafe { sluice_error_last(&mut why) };
    let message = unsafe { CStr::from_ptr(why.message.as_ptr()) };
    Err(Error { status, message: message.to_string_lossy().into_owned() })
}

impl sluice_tensor_t {
    /// Row-major 32-bit elements on the CPU. Memory and shape are borrowed until the last call that uses it.
    pub fn of<X>(data: &mut [X], type_code: i32, shape: &[i64]) -> Self {
        assert_eq!((data.len() as i64, mem::size_of::<X>()), (shape.iter().product(), 4));
        let mut it = Self::default();
        it.data = data.as_mut_ptr() as *mut c_void;
        it.shape = shape.as_ptr() as *mut i64;
        (it.device_type, it.ndim) = (SLUICE_DEVICE_CPU, shape.len() as i32);
        (it.type_code, it.type_bits, it.type_lanes) = (type_code as u8, 32, 1);
        it
    }
}

macro_rules! owner {
    ($name:ident, $handle:ident, $release:ident) => {
        #[doc = concat!("Owns a `", stringify!($handle), "`, or nothing.")]
        pub struct $name(*mut $handle);
        impl $name {
            pub fn none() -> $name { $name(ptr::null_mut()) }
            pub fn raw(&self) -> *mut $handle { self.0 }
            /// For an `out_` argument. What it owned is released.
            pub fn out(&mut self) -> *mut *mut $handle {
                *self = $name::none();
                &mut self.0
            }
        }
        impl Drop for $name {
            fn drop(&mut self) { unsafe { $release(self.0) } }
        }
        /// Any thread may use and release it, one at a time.
        unsafe impl Send for $name {}
    };
}
owner!(Comm, sluice_comm_t, sluice_comm_destroy);
owner!(LocalGroup, sluice_local_group_t, sluice_local_group_destroy);
owner!(Context, sluice_context_t, sluice_context_destroy);
owner!(Migration, sluice_migration_t, sluice_migration_destroy);
owner!(Moe, sluice_moe_t, sluice_moe_destroy);
owner!(Step, sluice_step_t, sluice_step_drop);
owner!(Optimizer, sluice_optimizer_t, sluice_optimizer_destroy);
owner!(Pipeline, sluice_pipeline_t, sluice_pipeline_destroy);
owner!(Plan, sluice_plan_t, sluice_plan_destroy);
owner!(Planner, sluice_planner_t, sluice_planner_destroy);
owner!(Schedule, sluice_schedule_t, sluice_schedule_destroy);
owner!(Dispatch, sluice_dispatch_t, sluice_dispatch_destroy);
