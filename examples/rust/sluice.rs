//! Hand-written bindings: what one MoE layer with Sluice's own gate needs of the C ABI (capi/include/sluice).
#![allow(dead_code)]
use std::os::raw::{c_char, c_void};
use std::{ffi::CStr, mem, ptr};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    pub data: *mut c_void,
    pub device_type: i32,
    pub device_id: i32,
    pub ndim: i32,
    pub type_code: u8,
    pub type_bits: u8,
    pub type_lanes: u16,
    pub shape: *const i64,
    pub strides: *const i64,
    pub byte_offset: u64,
}
pub const INT: u8 = 0;
pub const FLOAT: u8 = 2;

impl Tensor {
    /// Row-major 32-bit elements; memory and shape are borrowed until the last call that uses it.
    pub fn of<X>(data: &mut [X], type_code: u8, shape: &'static [i64]) -> Tensor {
        assert_eq!(data.len() as i64, shape.iter().product::<i64>());
        let (data, ndim) = (data.as_mut_ptr() as *mut c_void, shape.len() as i32);
        let (shape, strides) = (shape.as_ptr(), ptr::null());
        Tensor { data, device_type: 1, device_id: 0, ndim, type_code, type_bits: 32, type_lanes: 1, shape, strides, byte_offset: 0 }
    }
}

macro_rules! growing { // a struct that begins with its size and has an _init function
    ($name:ident, $init:ident, { $($field:ident: $kind:ty),* $(,)? }) => {
        #[repr(C)]
        pub struct $name { pub struct_size: usize, $(pub $field: $kind),* }
        extern "C" { fn $init(out: *mut $name, size: usize); }
        impl $name {
            pub fn new() -> $name {
                unsafe { let mut x: $name = mem::zeroed(); $init(&mut x, mem::size_of::<$name>()); x }
            }
        }
    };
}
type Ptr = *const c_void;
growing!(ErrorInfo, sluice_error_info_init, { status: i32, rank: i32, peer: i32, native_code: i32, message: [c_char; 1024] });
growing!(ContextConfig, sluice_context_config_init, {
    next: Ptr, device_type: i32, device_id: i32, gemm: *const c_char, gemm_library: *const c_char, host_gemm: Ptr, host_gemm_user: Ptr,
    allocate: Ptr, release: Ptr, allocate_user: Ptr });
growing!(GateConfig, sluice_gate_config_init, {
    next: Ptr, num_experts: i32, top_k: i32, score: i32, renormalize: i32, num_groups: i32, top_groups: i32, group_score_top: i32,
    drop_policy: i32, capacity: i64, capacity_factor: f32, scaling: f32, min_capacity: i64 });
growing!(MoeConfig, sluice_moe_config_init, {
    next: Ptr, model_width: i64, hidden_width: i64, num_experts: i32, top_k: i32, dtype: i32, activation: i32, gated: i32, bias: i32,
    num_chunks: i32, wgrad_mode: i32, callback_experts: i32, layer_id: i32, expert_rank: *const i32 });
growing!(ForwardArgs, sluice_moe_forward_args_init, {
    next: Ptr, tokens: *const Tensor, expert_ids: *const Tensor, route_weights: *const Tensor, params: *const ExpertTensors,
    callbacks: Ptr, out_tokens: *const Tensor, save: Ptr, save_user: Ptr, needs_backward: i32, local_status: i32,
    local_message: *const c_char });
growing!(BackwardArgs, sluice_moe_backward_args_init, {
    next: Ptr, tokens: *const Tensor, route_weights: *const Tensor, params: *const ExpertTensors, callbacks: Ptr,
    grad_out: *const Tensor, grad_tokens: *const Tensor, grad_route_weights: *const Tensor, grad_params: *const ExpertTensors,
    grad_mode: i32, halves: i32, expert_ready: Ptr, expert_ready_user: Ptr, local_status: i32, may_reuse_saved: i32,
    local_message: *const c_char });

#[repr(C)]
pub struct ExpertTensors {
    pub struct_size: usize,
    pub w1: *const Tensor,
    pub w3: *const Tensor,
    pub w2: *const Tensor,
    pub b1: *const Tensor,
    pub b3: *const Tensor,
    pub b2: *const Tensor,
}

extern "C" {
    fn sluice_error_last(out: *mut ErrorInfo);
    fn sluice_status_name(status: i32) -> *const c_char;
    fn sluice_build_info() -> *const c_char;
    fn sluice_context_create(config: *const ContextConfig, comm: *mut c_void, out: *mut *mut c_void) -> i32;
    fn sluice_context_destroy(context: *mut c_void);
    fn sluice_moe_create(context: *mut c_void, config: *const MoeConfig, out: *mut *mut c_void) -> i32;
    fn sluice_moe_destroy(moe: *mut c_void);
    fn sluice_moe_forward(moe: *mut c_void, args: *const ForwardArgs, stream: *mut c_void, out: *mut *mut c_void) -> i32;
    fn sluice_moe_backward(moe: *mut c_void, step: *mut c_void, args: *const BackwardArgs, stream: *mut c_void) -> i32;
    fn sluice_step_drop(step: *mut c_void);
    fn sluice_gate_forward(config: *const GateConfig, logits: *const Tensor, bias: *const Tensor, ids: *const Tensor,
        weights: *const Tensor, counts: *const Tensor, aux: *mut f32, z: *mut f32) -> i32;
    fn sluice_gate_backward(config: *const GateConfig, logits: *const Tensor, bias: *const Tensor, ids: *const Tensor,
        grad_weights: *const Tensor, grad_aux: f32, grad_z: f32, grad_logits: *const Tensor) -> i32;
}

fn text(p: *const c_char) -> String {
    unsafe { CStr::from_ptr(p).to_string_lossy().into_owned() }
}
pub fn build_info() -> String {
    text(unsafe { sluice_build_info() })
}
pub fn check(status: i32) -> Result<(), String> {
    if status == 0 { return Ok(()); }
    let mut why = ErrorInfo::new();
    unsafe { sluice_error_last(&mut why) };
    Err(format!("{}: {}", text(unsafe { sluice_status_name(status) }), text(why.message.as_ptr())))
}

/// A layer on a context of its own, one rank.
pub struct Moe(*mut c_void);
pub struct Step(*mut c_void);
impl Moe {
    pub fn new(config: &MoeConfig) -> Result<Moe, String> {
        let (mut context, mut moe) = (ptr::null_mut(), ptr::null_mut());
        check(unsafe { sluice_context_create(&ContextConfig::new(), ptr::null_mut(), &mut context) })?;
        let made = check(unsafe { sluice_moe_create(context, config, &mut moe) });
        unsafe { sluice_context_destroy(context) }; // the layer keeps it alive
        made.map(|_| Moe(moe))
    }
    pub fn forward(&mut self, args: &ForwardArgs) -> Result<Step, String> {
        let mut step = ptr::null_mut();
        check(unsafe { sluice_moe_forward(self.0, args, ptr::null_mut(), &mut step) }).map(|_| Step(step))
    }
    pub fn backward(&mut self, step: &Step, args: &BackwardArgs) -> Result<(), String> {
        check(unsafe { sluice_moe_backward(self.0, step.0, args, ptr::null_mut()) })
    }
}
impl Drop for Moe {
    fn drop(&mut self) { unsafe { sluice_moe_destroy(self.0) } }
}
impl Drop for Step {
    fn drop(&mut self) { unsafe { sluice_step_drop(self.0) } }
}
pub fn gate_forward(config: &GateConfig, logits: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<(), String> {
    let none = ptr::null();
    check(unsafe { sluice_gate_forward(config, logits, none, ids, weights, none, ptr::null_mut(), ptr::null_mut()) })
}
pub fn gate_backward(config: &GateConfig, logits: &Tensor, ids: &Tensor, grad_weights: &Tensor, grad_logits: &Tensor) -> Result<(), String> {
    check(unsafe { sluice_gate_backward(config, logits, ptr::null(), ids, grad_weights, 0.0, 0.0, grad_logits) })
}
