use crate::emulator::{Emulator, Order, Variant};
use tinyvllm::ops::metal::{Binding, Constant, Gpu, Launch, Library, Placement};

static EXAMPLE: Library = Library { name: "example", source: include_str!("kernels/example.metal") };

fn run(variant: Variant, order: Order) {
    let Some(gpu) = Emulator::new(variant) else { return };
    let gpu = gpu.with_order(order);
    let pipeline = gpu.pipeline(&EXAMPLE, "paged_attn_decode_f32_128", &[Constant::U16(0, 4)]).unwrap();
    let (h, kv, d, bs, mb, n) = (4usize, 2usize, 128usize, 16usize, 4usize, 50usize);
    let mut s = 1u64;
    let mut r = || {
        s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((s >> 40) as f32 / (1u64 << 24) as f32) - 0.5
    };
    let q: Vec<f32> = (0..h * d).map(|_| r()).collect();
    let k: Vec<f32> = (0..mb * kv * bs * d).map(|_| r()).collect();
    let v: Vec<f32> = (0..mb * kv * bs * d).map(|_| r()).collect();
    let bt = [2i32, 0, 3, 1];
    let scale = 0.088388346f32;
    let buffer = |bytes: &[u8]| {
        let b = gpu.allocate(bytes.len().max(16), Placement::Private).unwrap();
        gpu.write(&b, 0, bytes).unwrap();
        b
    };
    let (bq, bk, bv, bbt, bcl) = (
        buffer(bytemuck::cast_slice(&q)),
        buffer(bytemuck::cast_slice(&k)),
        buffer(bytemuck::cast_slice(&v)),
        buffer(bytemuck::cast_slice(&bt)),
        buffer(bytemuck::cast_slice(&[n as i32])),
    );
    let out = gpu.allocate(h * d * 4, Placement::Private).unwrap();
    let mut args = Vec::new();
    for x in [h, kv, d, bs, mb] {
        args.extend((x as i32).to_le_bytes());
    }
    args.extend(scale.to_le_bytes());
    let buffers = [
        Binding::read(&bq),
        Binding::read(&bk),
        Binding::read(&bv),
        Binding::read(&bbt),
        Binding::read(&bcl),
        Binding::write(&out),
    ];
    let launch = Launch {
        pipeline,
        args: &args,
        buffers: &buffers,
        threadgroup_memory: 4 * (d + 2) * 4,
        grid: [h, 1, 1],
        num_threads: 128,
    };
    let t = std::time::Instant::now();
    gpu.dispatch(&launch).unwrap();
    gpu.dispatch(&launch).unwrap();
    eprintln!("{variant:?} {:?}", t.elapsed() / 2);
    let mut o = vec![0f32; h * d];
    gpu.read(&out, 0, bytemuck::cast_slice_mut(&mut o)).unwrap();
    for hh in 0..h {
        let g = hh / (h / kv);
        let row = |c: &Vec<f32>, i: usize| {
            let o = ((bt[i / bs] as usize * kv + g) * bs + i % bs) * d;
            c[o..o + d].to_vec()
        };
        let x: Vec<f32> = (0..n)
            .map(|i| row(&k, i).iter().zip(&q[hh * d..]).map(|(a, b)| a * b).sum::<f32>() * scale)
            .collect();
        let m = x.iter().copied().fold(f32::MIN, f32::max);
        let z: f32 = x.iter().map(|v| (v - m).exp()).sum();
        for j in 0..d {
            let e: f32 = (0..n).map(|i| (x[i] - m).exp() / z * row(&v, i)[j]).sum();
            assert!((e - o[hh * d + j]).abs() < 1e-5);
        }
    }
}

#[test]
fn fast() {
    run(Variant::Fast, Order::InOrder);
}
#[test]
fn checked() {
    run(Variant::Checked, Order::Random(3));
}
