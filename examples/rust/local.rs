// SPDX-License-Identifier: Apache-2.0
//! Expert parallelism in one process, as examples/c/local4.c: the ranks are threads, 1, 2 (the default), 4 or 8.
//!
//!     examples/rust/build.sh /tmp/out && /tmp/out/local_rust [ranks]
use sluice::*;
use std::ptr;

const TOKENS: usize = 192; // of all ranks together, so that losses do not depend on the number of ranks
const M: usize = 16;
const H: usize = 32;
const E: usize = 8;
const K: usize = 2;
const STEPS: usize = 40;

/// Returns a number in [-1, 1) that depends only on the arguments, not on the rank.
fn noise(kind: u32, i: usize) -> f32 {
    let mut h = kind.wrapping_mul(0x9e3779b9).wrapping_add((i as u32).wrapping_mul(0x85ebca6b));
    h ^= h >> 16;
    h = h.wrapping_mul(0x7feb352d);
    h ^= h >> 15;
    h = h.wrapping_mul(0x846ca68b);
    h ^= h >> 16;
    (h >> 8) as f32 / 8388608.0 - 1.0
}

/// Returns one tensor for each expert that this rank owns.
fn per_expert(data: &mut [f32], shape: &[i64]) -> Vec<sluice_tensor_t> {
    data.chunks_mut(H * M).map(|part| sluice_tensor_t::of(part, SLUICE_TYPE_FLOAT, shape)).collect()
}

fn experts(w1: &[sluice_tensor_t], w2: &[sluice_tensor_t]) -> sluice_expert_tensors_t {
    let mut it = sluice_expert_tensors_t::default();
    (it.w1, it.w2) = (w1.as_ptr(), w2.as_ptr());
    it
}

/// Returns this rank's part of each step's loss, which is the sum over the ranks.
fn train(comm: Comm) -> Result<Vec<f64>, Error> {
    let (rank, ranks) = unsafe { (sluice_comm_rank(comm.raw()) as usize, sluice_comm_world_size(comm.raw()) as usize) };
    let (mut context, mut moe) = (Context::none(), Moe::none());
    check(unsafe { sluice_context_create(&Default::default(), comm.raw(), context.out()) })?;
    let mut config = sluice_moe_config_t::default();
    (config.model_width, config.hidden_width) = (M as i64, H as i64);
    (config.num_experts, config.top_k) = (E as i32, K as i32);
    config.num_chunks = 2; // one half is sent while the other is computed
    check(unsafe { sluice_moe_create(context.raw(), &config, moe.out()) })?;

    let (begin, end) = (TOKENS * rank / ranks, TOKENS * (rank + 1) / ranks);
    let (tokens, local) = (end - begin, unsafe { sluice_moe_num_local_experts(moe.raw()) } as usize);
    let mut x: Vec<f32> = (begin * M..end * M).map(|i| noise(1, i)).collect();
    let target: Vec<f32> = (0..tokens * M).map(|i| (3.0 * x[i / M * M + (i + 1) % M]).sin()).collect();
    let mut ids: Vec<i32> = (0..tokens * K)
        .map(|i| ((x[i / K * M] > 0.0) as i32 + 2 * (x[i / K * M + 1] > 0.0) as i32 + 4 * (i % K) as i32) % E as i32)
        .collect(); // a fixed router, by the signs of coordinates of x
    let mut weights = vec![0.5f32; tokens * K];
    let first = E / ranks * rank * H * M;
    let mut w1: Vec<f32> = (0..local * H * M).map(|i| 0.4 * noise(2, first + i)).collect();
    let mut w2: Vec<f32> = (0..local * H * M).map(|i| 0.3 * noise(3, first + i)).collect();
    let (mut grad_w1, mut grad_w2) = (w1.clone(), w2.clone());
    let (mut y, mut grad_y) = (vec![0f32; tokens * M], vec![0f32; tokens * M]);

    let (rows, routes, up, down) = ([tokens as i64, M as i64], [tokens as i64, K as i64], [H as i64, M as i64], [M as i64, H as i64]);
    let tensor = |data: &mut [f32], shape| sluice_tensor_t::of(data, SLUICE_TYPE_FLOAT, shape);
    let (tx, ty, tgrad_y) = (tensor(&mut x, &rows), tensor(&mut y, &rows), tensor(&mut grad_y, &rows));
    let (tids, tweights) = (sluice_tensor_t::of(&mut ids, SLUICE_TYPE_INT, &routes), tensor(&mut weights, &routes));
    let (p1, p2) = (per_expert(&mut w1, &up), per_expert(&mut w2, &down));
    let (g1, g2) = (per_expert(&mut grad_w1, &up), per_expert(&mut grad_w2, &down));
    let (params, grads) = (experts(&p1, &p2), experts(&g1, &g2));

    let mut losses = vec![0f64; STEPS];
    for loss in losses.iter_mut() {
        let mut step = Step::none();
        let mut forward = sluice_moe_forward_args_t::default();
        (forward.tokens, forward.expert_ids, forward.route_weights) = (&tx, &tids, &tweights);
        (forward.params, forward.out_tokens, forward.needs_backward) = (&params, &ty, 1);
        check(unsafe { sluice_moe_forward(moe.raw(), &forward, ptr::null_mut(), step.out()) })?;
        for i in 0..tokens * M {
            let error = (read(&y, i) - target[i]) as f64;
            *loss += error * error / (TOKENS * M) as f64;
            grad_y[i] = (2.0 * error / (TOKENS * M) as f64) as f32;
        }
        let mut backward = sluice_moe_backward_args_t::default();
        (backward.tokens, backward.route_weights, backward.params) = (&tx, &tweights, &params);
        (backward.grad_out, backward.grad_params) = (&tgrad_y, &grads);
        check(unsafe { sluice_moe_backward(moe.raw(), step.raw(), &backward, ptr::null_mut()) })?;
        for i in 0..local * H * M {
            w1[i] -= 1.5 * read(&grad_w1, i); // an expert's gradient is a sum over the tokens of all ranks
            w2[i] -= 1.5 * read(&grad_w2, i);
        }
    }
    Ok(losses)
}

/// Reads memory that the library has written through the address in a tensor, which the compiler does not know.
fn read(data: &[f32], i: usize) -> f32 {
    unsafe { ptr::read_volatile(&data[i]) }
}

fn main() -> Result<(), Error> {
    let ranks: usize = std::env::args().nth(1).map_or(2, |text| text.parse().expect("ranks: 1, 2, 4 or 8"));
    let mut group = LocalGroup::none();
    check(unsafe { sluice_local_group_create(ranks as i32, group.out()) })?;
    let mut threads = Vec::new();
    for rank in 0..ranks {
        let mut config = sluice_comm_config_t::default();
        (config.rank, config.world_size) = (rank as i32, ranks as i32);
        let mut comm = Comm::none();
        check(unsafe { sluice_comm_create_local(group.raw(), &config, comm.out()) })?;
        threads.push(std::thread::spawn(move || train(comm)));
    }
    let results: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect();
    let losses = results.into_iter().collect::<Result<Vec<_>, _>>()?;
    for step in (0..STEPS).step_by(10).chain([STEPS - 1]) {
        let loss: f64 = losses.iter().map(|mine| mine[step]).sum();
        println!("step {step:2} loss {loss:.6} ({ranks} ranks)");
    }
    Ok(())
}
