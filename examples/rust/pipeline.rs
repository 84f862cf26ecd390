//! A chain of layers over three stages, each a thread: the losses of one loop, to the bit.
//!
//!     examples/rust/build.sh /tmp/out && /tmp/out/pipeline_rust
#[macro_use]
mod sluice;
mod sluice_pipeline;
use sluice::{Tensor, FLOAT};
use sluice_pipeline::*;
use std::os::raw::c_void;

const STAGES: usize = 3;
const MICRO_BATCHES: usize = 6;
const WIDTH: usize = 64;
const STEPS: usize = 50;
static SHAPE: [i64; 1] = [WIDTH as i64];

/// y = w x, elementwise: what a layer learns, and what a stage keeps of each micro-batch.
struct Stage {
    w: Vec<f32>,
    grad: Vec<f32>,
    x: Vec<Vec<f32>>,
    y: Vec<Vec<f32>>,
    dx: Vec<Vec<f32>>,
    out: Vec<Tensor>,
    back: Vec<Tensor>,
    loss: f32,
}

impl Stage {
    fn new(c: usize) -> Stage {
        let none = || vec![vec![0f32; WIDTH]; MICRO_BATCHES];
        let (mut y, mut dx) = (none(), none());
        let tensors = |rows: &mut Vec<Vec<f32>>| rows.iter_mut().map(|row| Tensor::of(row, FLOAT, &SHAPE)).collect();
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
    /// The last stage's: towards half of the input; adds to the loss and returns its gradient.
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

extern "C" fn forward(user: *mut c_void, call: *const StageCall, result: *mut StageTensors, _: *mut HostFailure) -> i32 {
    let (stage, call) = unsafe { (&mut *(user as *mut Stage), &*call) };
    let i = call.micro_batch as usize;
    if call.is_first == 1 { stage.forward(i, &input(i)) } else { stage.forward(i, floats(call.input, WIDTH)) }
    unsafe { (*result).tensors = &stage.out[i]; (*result).num_tensors = 1; }
    0
}

extern "C" fn backward(user: *mut c_void, call: *const StageCall, result: *mut StageTensors, _: *mut HostFailure) -> i32 {
    let (stage, call) = unsafe { (&mut *(user as *mut Stage), &*call) };
    let i = call.micro_batch as usize;
    let error = if call.is_last == 1 { stage.error(i) } else { floats(call.output_grad, WIDTH).to_vec() };
    stage.backward(i, &error);
    unsafe { (*result).tensors = &stage.back[i]; (*result).num_tensors = 1; }
    0
}

fn train(group: &LocalGroup, rank: usize) -> Result<Vec<f32>, String> {
    let mut stage = Stage::new(rank);
    let (struct_size, none) = (std::mem::size_of::<PipelineCallbacks>(), None);
    let callbacks = PipelineCallbacks { struct_size, load: none, forward: Some(forward), loss: none, backward: Some(backward),
        weight_grad: none, release: None, is_interrupted: None };
    let user: *mut Stage = &mut stage;
    let mut pipeline = Pipeline::new(group, rank as i32, STAGES as i32, &callbacks, user as *mut c_void)?;
    (0..STEPS).map(|_| {
        unsafe { (*user).loss = 0.0 };
        pipeline.run_batch(MICRO_BATCHES as i32)?;
        unsafe { (*user).descend(); Ok((*user).loss) }
    }).collect()
}

/// The same in one loop.
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

fn main() -> Result<(), String> {
    let group = LocalGroup::new(STAGES as i32)?;
    let losses = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..STAGES).map(|rank| { let group = &group; scope.spawn(move || train(group, rank)) }).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a stage panicked")).collect::<Result<Vec<_>, _>>()
    })?;
    for step in (0..STEPS).step_by(10).chain([STEPS - 1]) { println!("step {step:2} loss {:.6}", losses[STAGES - 1][step]); }
    if losses[STAGES - 1] != train_alone() { return Err("the losses are not those of one loop".into()); }
    Ok(())
}
