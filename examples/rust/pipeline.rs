// SPDX-License-Identifier: Apache-2.0
//! Trains a chain of layers over three stages, which are threads; losses have the bits of a loop without a pipeline.
//!
//!     examples/rust/build.sh /tmp/out && /tmp/out/pipeline_rust
use sluice::*;
use std::os::raw::c_void;

const STAGES: usize = 3;
const MICRO_BATCHES: usize = 6;
const WIDTH: usize = 64;
const STEPS: usize = 50;
static SHAPE: [i64; 1] = [WIDTH as i64];

/// A stage with one layer, y = w x elementwise: its parameters, and the data that it keeps of each micro-batch.
struct Stage {
    w: Vec<f32>,
    grad: Vec<f32>,
    x: Vec<Vec<f32>>,
    y: Vec<Vec<f32>>,
    dx: Vec<Vec<f32>>,
    out: Vec<sluice_tensor_t>,
    back: Vec<sluice_tensor_t>,
    loss: f32,
}

impl Stage {
    fn new(c: usize) -> Stage {
        let none = || vec![vec![0f32; WIDTH]; MICRO_BATCHES];
        let (mut y, mut dx) = (none(), none());
        let tensors = |rows: &mut Vec<Vec<f32>>| rows.iter_mut().map(|row| sluice_tensor_t::of(row, SLUICE_TYPE_FLOAT, &SHAPE)).collect();
        let (out, back) = (tensors(&mut y), tensors(&mut dx));
        Stage { w: vec![0.8 + 0.1 * c as f32; WIDTH], grad: vec![0f32; WIDTH], x: none(), y, dx, out, back, loss: 0.0 }
    }
    fn forward(&mut self, i: usize, x: &[f32]) {
        self.x[i].copy_from_slice(x);
        for e in 0..WIDTH { self.y[i][e] = self.w[e] * x[e]; }
    }
    fn backward(&mut self, i: usize, dy: &[f32]) {
        for e in 0..WIDTH {
            self.grad[e] += dy[e] * self.x[i][e];
            self.dx[i][e] = dy[e] * self.w[e];
        }
    }
    /// For the last stage, whose target is half of the input: adds to the loss and returns its gradient.
    fn error(&mut self, i: usize) -> Vec<f32> {
        let wanted = input(i);
        let error: Vec<f32> = (0..WIDTH).map(|e| self.y[i][e] - 0.5 * wanted[e]).collect();
        for e in &error { self.loss += e * e / (WIDTH * MICRO_BATCHES) as f32; }
        error
    }
    fn descend(&mut self) {
        for e in 0..WIDTH { self.w[e] -= 0.02 * self.grad[e]; }
        self.grad.fill(0.0);
    }
}

fn input(i: usize) -> Vec<f32> {
    (0..WIDTH).map(|e| ((i * 31 + e * 17) % 23) as f32 / 11.5 - 1.0).collect()
}

/// Returns the data of the first tensor of a message, which is valid until the callback's micro-batch ends.
fn floats<'a>(edge: *const sluice_stage_tensors_t) -> &'a [f32] {
    unsafe { std::slice::from_raw_parts((*(*edge).tensors).data as *const f32, WIDTH) }
}

type Call = *const sluice_stage_call_t;
type Tensors = *mut sluice_stage_tensors_t;
type Failure = *mut sluice_host_failure_t;

unsafe extern "C" fn forward(user: *mut c_void, call: Call, result: Tensors, _: Failure) -> i32 {
    let (stage, call) = (&mut *(user as *mut Stage), &*call);
    let i = call.micro_batch as usize;
    if call.is_first == 1 { stage.forward(i, &input(i)) } else { stage.forward(i, floats(call.input)) }
    ((*result).tensors, (*result).num_tensors) = (&stage.out[i], 1);
    0
}

unsafe extern "C" fn backward(user: *mut c_void, call: Call, result: Tensors, _: Failure) -> i32 {
    let (stage, call) = (&mut *(user as *mut Stage), &*call);
    let i = call.micro_batch as usize;
    let error = if call.is_last == 1 { stage.error(i) } else { floats(call.output_grad).to_vec() };
    stage.backward(i, &error);
    ((*result).tensors, (*result).num_tensors) = (&stage.back[i], 1);
    0
}

fn train(comm: Comm) -> Result<Vec<f32>, Error> {
    let mut stage = Stage::new(unsafe { sluice_comm_rank(comm.raw()) } as usize);
    let mut callbacks = sluice_pipeline_callbacks_t::default();
    callbacks.forward = Some(forward);
    callbacks.backward = Some(backward);
    let user: *mut Stage = &mut stage;
    let mut pipeline = Pipeline::none();
    check(unsafe { sluice_pipeline_create(&Default::default(), comm.raw(), &callbacks, user as *mut c_void, pipeline.out()) })?;
    let mut batch = sluice_pipeline_batch_t::default();
    batch.num_micro_batches = MICRO_BATCHES as i32;
    (0..STEPS).map(|_| {
        unsafe { (*user).loss = 0.0 };
        check(unsafe { sluice_pipeline_run_batch(pipeline.raw(), &batch) })?;
        unsafe { (*user).descend(); Ok((*user).loss) }
    }).collect()
}

/// Trains the same chain in one loop.
fn train_alone() -> Vec<f32> {
    let mut stages: Vec<Stage> = (0..STAGES).map(Stage::new).collect();
    (0..STEPS).map(|_| {
        stages[STAGES - 1].loss = 0.0;
        for i in 0..MICRO_BATCHES {
            let mut rows = input(i);
            for stage in stages.iter_mut() { stage.forward(i, &rows); rows = stage.y[i].clone(); }
            rows = stages[STAGES - 1].error(i);
            for stage in stages.iter_mut().rev() { stage.backward(i, &rows); rows = stage.dx[i].clone(); }
        }
        for stage in stages.iter_mut() { stage.descend(); }
        stages[STAGES - 1].loss
    }).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut group = LocalGroup::none();
    check(unsafe { sluice_local_group_create(STAGES as i32, group.out()) })?;
    let mut ranks = Vec::new();
    for rank in 0..STAGES {
        let mut config = sluice_comm_config_t::default();
        (config.rank, config.world_size) = (rank as i32, STAGES as i32);
        let mut comm = Comm::none();
        check(unsafe { sluice_comm_create_local(group.raw(), &config, comm.out()) })?;
        ranks.push(std::thread::spawn(move || train(comm)));
    }
    let results: Vec<_> = ranks.into_iter().map(|rank| rank.join().expect("a stage panicked")).collect();
    let losses = results.into_iter().collect::<Result<Vec<_>, _>>()?;
    for step in (0..STEPS).step_by(10).chain([STEPS - 1]) { println!("step {step:2} loss {:.6}", losses[STAGES - 1][step]); }
    if losses[STAGES - 1] != train_alone() { return Err("the losses are not those of one loop".into()); }
    Ok(())
}
