// SPDX-License-Identifier: Apache-2.0
//! The layer of examples/c/layer.c in Rust, with the same numbers.
//!
//!     examples/rust/build.sh /tmp/out && /tmp/out/layer_rust
use sluice::*;
use std::ptr;

const T: usize = 96;
const M: usize = 16;
const H: usize = 32;
const E: usize = 4;
const K: usize = 2;
const STEPS: usize = 60;

struct Noise(i64);
impl Noise {
    fn next(&mut self, scale: f32) -> f32 {
        self.0 = (self.0 * 1103515245 + 12345) % 2147483648;
        scale * (2.0 * self.0 as f32 / 2147483648.0 - 1.0)
    }
}

fn floats(data: &mut [f32], shape: &[i64]) -> sluice_tensor_t {
    sluice_tensor_t::of(data, SLUICE_TYPE_FLOAT, shape)
}

fn per_expert(data: &mut [f32], shape: &[i64]) -> Vec<sluice_tensor_t> {
    let size = data.len() / E;
    data.chunks_mut(size).map(|part| floats(part, shape)).collect()
}

fn experts(w1: &[sluice_tensor_t], b1: &[sluice_tensor_t], w2: &[sluice_tensor_t], b2: &[sluice_tensor_t]) -> sluice_expert_tensors_t {
    let mut it = sluice_expert_tensors_t::default();
    (it.w1, it.b1, it.w2, it.b2) = (w1.as_ptr(), b1.as_ptr(), w2.as_ptr(), b2.as_ptr());
    it
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("{}", unsafe { std::ffi::CStr::from_ptr(sluice_build_info()) }.to_str()?);
    let mut noise = Noise(1);
    let (mut x, mut target) = (vec![0f32; T * M], vec![0f32; T * M]);
    for t in 0..T {
        for m in 0..M { x[t * M + m] = noise.next(1.0); }
        for m in 0..M { target[t * M + m] = (3.0 * x[t * M + (m + 1) % M]).sin(); }
    }
    let mut router: Vec<f32> = (0..M * E).map(|_| noise.next(0.2)).collect();
    let (mut w1, mut w2) = (vec![0f32; E * H * M], vec![0f32; E * M * H]);
    for i in 0..E * H * M {
        w1[i] = noise.next(0.4);
        w2[i] = noise.next(0.3);
    }
    let (mut b1, mut b2) = (vec![0f32; E * H], vec![0f32; E * M]);
    let (mut grad_w1, mut grad_w2, mut grad_b1, mut grad_b2) = (w1.clone(), w2.clone(), b1.clone(), b2.clone());
    let (mut y, mut grad_y) = (vec![0f32; T * M], vec![0f32; T * M]);
    let (mut logits, mut grad_logits) = (vec![0f32; T * E], vec![0f32; T * E]);
    let (mut ids, mut weights, mut grad_weights) = (vec![0i32; T * K], vec![0f32; T * K], vec![0f32; T * K]);

    let mut config = sluice_moe_config_t::default();
    config.model_width = M as i64;
    config.hidden_width = H as i64;
    config.num_experts = E as i32;
    config.top_k = K as i32;
    config.bias = 1;
    let (mut context, mut moe) = (Context::none(), Moe::none());
    check(unsafe { sluice_context_create(&Default::default(), ptr::null_mut(), context.out()) })?;
    check(unsafe { sluice_moe_create(context.raw(), &config, moe.out()) })?;
    let mut gate = sluice_gate_config_t::default();
    gate.num_experts = E as i32;
    gate.top_k = K as i32;
    gate.renormalize = 1;

    const ROWS: &[i64] = &[T as i64, M as i64];
    const SCORES: &[i64] = &[T as i64, E as i64];
    const ROUTES: &[i64] = &[T as i64, K as i64];
    const UP: &[i64] = &[H as i64, M as i64];
    const DOWN: &[i64] = &[M as i64, H as i64];
    let (tx, ty, tgrad_y) = (floats(&mut x, ROWS), floats(&mut y, ROWS), floats(&mut grad_y, ROWS));
    let (tlogits, tgrad_logits) = (floats(&mut logits, SCORES), floats(&mut grad_logits, SCORES));
    let (tids, tweights) = (sluice_tensor_t::of(&mut ids, SLUICE_TYPE_INT, ROUTES), floats(&mut weights, ROUTES));
    let tgrad_weights = floats(&mut grad_weights, ROUTES);
    let (p1, q1) = (per_expert(&mut w1, UP), per_expert(&mut b1, &UP[..1]));
    let (p2, q2) = (per_expert(&mut w2, DOWN), per_expert(&mut b2, &DOWN[..1]));
    let params = experts(&p1, &q1, &p2, &q2);
    let (g1, h1) = (per_expert(&mut grad_w1, UP), per_expert(&mut grad_b1, &UP[..1]));
    let (g2, h2) = (per_expert(&mut grad_w2, DOWN), per_expert(&mut grad_b2, &DOWN[..1]));
    let grads = experts(&g1, &h1, &g2, &h2);

    let (mut first, mut loss) = (0f64, 0f64);
    for step in 0..STEPS {
        for t in 0..T {
            for e in 0..E { logits[t * E + e] = (0..M).map(|m| x[t * M + m] * router[m * E + e]).sum(); }
        }
        let none = ptr::null();
        check(unsafe { sluice_gate_forward(&gate, &tlogits, none, &tids, &tweights, none, ptr::null_mut(), ptr::null_mut()) })?;
        let mut forward = sluice_moe_forward_args_t::default();
        forward.tokens = &tx;
        forward.expert_ids = &tids;
        forward.route_weights = &tweights;
        forward.params = &params;
        forward.out_tokens = &ty;
        forward.needs_backward = 1;
        let mut saved = Step::none();
        check(unsafe { sluice_moe_forward(moe.raw(), &forward, ptr::null_mut(), saved.out()) })?;

        loss = 0.0;
        for i in 0..T * M {
            let error = read(&y, i) as f64 - target[i] as f64;
            loss += error * error / (T * M) as f64;
            grad_y[i] = (2.0 * error / (T * M) as f64) as f32;
        }
        if step == 0 { first = loss; }
        if step % 10 == 0 || step == STEPS - 1 { println!("step {step:2} loss {loss:.6}"); }

        let mut backward = sluice_moe_backward_args_t::default();
        backward.tokens = &tx;
        backward.route_weights = &tweights;
        backward.params = &params;
        backward.grad_out = &tgrad_y;
        backward.grad_route_weights = &tgrad_weights;
        backward.grad_params = &grads;
        check(unsafe { sluice_moe_backward(moe.raw(), saved.raw(), &backward, ptr::null_mut()) })?;
        check(unsafe { sluice_gate_backward(&gate, &tlogits, none, &tids, &tgrad_weights, 0.0, 0.0, &tgrad_logits) })?;

        let rate = 1.5f32;
        for m in 0..M {
            for e in 0..E {
                for t in 0..T { router[m * E + e] -= rate * x[t * M + m] * read(&grad_logits, t * E + e); }
            }
        }
        for (parameter, gradient) in [(&mut w1, &grad_w1), (&mut w2, &grad_w2), (&mut b1, &grad_b1), (&mut b2, &grad_b2)] {
            for i in 0..parameter.len() { parameter[i] -= rate * read(gradient, i); }
        }
    }
    println!("loss {first:.6} -> {loss:.6}");
    if loss < 0.8 * first { Ok(()) } else { Err("the loss did not fall".into()) }
}

/// Reads memory that the library has written through the address in a tensor, which the compiler does not know.
fn read(data: &[f32], i: usize) -> f32 {
    unsafe { ptr::read_volatile(&data[i]) }
}
