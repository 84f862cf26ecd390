//! The layer of examples/c/layer.c in Rust, with the same numbers.
//!
//!     examples/rust/build.sh /tmp/out && /tmp/out/layer_rust
mod sluice;
use sluice::*;

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

fn per_expert(data: &mut [f32], shape: &'static [i64]) -> Vec<Tensor> {
    let size = data.len() / E;
    data.chunks_mut(size).map(|part| Tensor::of(part, FLOAT, shape)).collect()
}

fn experts(w1: &[Tensor], b1: &[Tensor], w2: &[Tensor], b2: &[Tensor]) -> ExpertTensors {
    let none = std::ptr::null();
    let struct_size = std::mem::size_of::<ExpertTensors>();
    ExpertTensors { struct_size, w1: w1.as_ptr(), w3: none, w2: w2.as_ptr(), b1: b1.as_ptr(), b3: none, b2: b2.as_ptr() }
}

fn main() -> Result<(), String> {
    println!("{}", build_info());
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

    let mut config = MoeConfig::new();
    config.model_width = M as i64;
    config.hidden_width = H as i64;
    config.num_experts = E as i32;
    config.top_k = K as i32;
    config.bias = 1;
    let mut moe = Moe::new(&config)?;
    let mut gate = GateConfig::new();
    gate.num_experts = E as i32;
    gate.top_k = K as i32;
    gate.renormalize = 1;

    const ROWS: &[i64] = &[T as i64, M as i64];
    const SCORES: &[i64] = &[T as i64, E as i64];
    const ROUTES: &[i64] = &[T as i64, K as i64];
    const UP: &[i64] = &[H as i64, M as i64];
    const DOWN: &[i64] = &[M as i64, H as i64];
    let (tx, ty, tgrad_y) = (Tensor::of(&mut x, FLOAT, ROWS), Tensor::of(&mut y, FLOAT, ROWS), Tensor::of(&mut grad_y, FLOAT, ROWS));
    let (tlogits, tgrad_logits) = (Tensor::of(&mut logits, FLOAT, SCORES), Tensor::of(&mut grad_logits, FLOAT, SCORES));
    let (tids, tweights) = (Tensor::of(&mut ids, INT, ROUTES), Tensor::of(&mut weights, FLOAT, ROUTES));
    let tgrad_weights = Tensor::of(&mut grad_weights, FLOAT, ROUTES);
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
        gate_forward(&gate, &tlogits, &tids, &tweights)?;
        let mut forward = ForwardArgs::new();
        forward.tokens = &tx;
        forward.expert_ids = &tids;
        forward.route_weights = &tweights;
        forward.params = &params;
        forward.out_tokens = &ty;
        forward.needs_backward = 1;
        let saved = moe.forward(&forward)?;

        loss = 0.0;
        for i in 0..T * M {
            let error = read(&y, i) as f64 - target[i] as f64;
            loss += error * error / (T * M) as f64;
            grad_y[i] = (2.0 * error / (T * M) as f64) as f32;
        }
        if step == 0 { first = loss; }
        if step % 10 == 0 || step == STEPS - 1 { println!("step {step:2} loss {loss:.6}"); }

        let mut backward = BackwardArgs::new();
        backward.tokens = &tx;
        backward.route_weights = &tweights;
        backward.params = &params;
        backward.grad_out = &tgrad_y;
        backward.grad_route_weights = &tgrad_weights;
        backward.grad_params = &grads;
        moe.backward(&saved, &backward)?;
        gate_backward(&gate, &tlogits, &tids, &tgrad_weights, &tgrad_logits)?;

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

/// The library wrote behind the compiler's back, through the addresses in a Tensor.
fn read(data: &[f32], i: usize) -> f32 {
    unsafe { std::ptr::read_volatile(&data[i]) }
}
