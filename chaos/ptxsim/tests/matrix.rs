//! Matrix instructions and arithmetic in hand-written PTX, against sums that do not know the layout of registers.

use phalanx_ptxsim::{Arg, Device, Kind, Module, Options};

/// Runs a kernel of one warp with pointers to `a`, `b` and an output of `bytes`.
fn run(body: &str, a: &[u8], b: &[u8], bytes: usize) -> Vec<u8> {
    let ptx = format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 out)\n{{\n\
         .reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<32>, %t, %g, %c; .reg .f32 %f<16>; .reg .b64 %rd<16>, %a, %b, %out;\n\
         .shared .align 16 .b8 s[1024];\n\
         ld.param.u64 %a, [a]; ld.param.u64 %b, [b]; ld.param.u64 %out, [out];\n\
         mov.u32 %t, %tid.x; shr.u32 %g, %t, 2; and.b32 %c, %t, 3;\n{body}\nret;\n}}\n"
    );
    let module = Module::parse(&ptx).unwrap();
    let mut device = Device::new();
    let args = [device.alloc_written(a), device.alloc_written(b), device.alloc(bytes)];
    let out = args[2];
    let kernel = module.kernel("k").unwrap();
    let run = kernel.launch(&mut device, [1, 1, 1], [32, 1, 1], 0, &args.map(Arg::Ptr)).unwrap();
    assert!(run.findings.is_empty(), "{}", run.findings[0]);
    device.bytes(out).to_vec()
}

/// Small whole numbers, exact in every format, by position.
fn whole(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7 + seed * 3) % 13) as f32 - 6.0).collect()
}

fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect()
}

fn f32_values(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// D `[16, 8]` = A `[16, k]` B `[8, k]`^T.
fn product(a: &[f32], b: &[f32], k: usize) -> Vec<f32> {
    (0..16 * 8).map(|at| (0..k).map(|i| a[at / 8 * k + i] * b[at % 8 * k + i]).sum()).collect()
}

/// Stores the four sums of a lane into D `[16, 8]`.
const STORE: &str = "mad.lo.u32 %r20, %g, 32, 0; mad.lo.u32 %r20, %c, 8, %r20; cvt.u64.u32 %rd5, %r20; add.u64 %rd5, %out, %rd5;\n\
    st.global.v2.f32 [%rd5], {%f0, %f1}; st.global.v2.f32 [%rd5+256], {%f2, %f3};";

#[test]
fn bf16_product_from_registers_equals_the_sum() {
    let (a, b) = (whole(16 * 16, 1), whole(8 * 16, 2));
    // Row g of A at 32 g bytes, columns 2 c at 4 c bytes.
    let body = format!(
        "mad.lo.u32 %r20, %g, 32, 0; mad.lo.u32 %r20, %c, 4, %r20; cvt.u64.u32 %rd1, %r20; add.u64 %rd2, %a, %rd1; add.u64 %rd3, %b, %rd1;\n\
         ld.global.u32 %r0, [%rd2]; ld.global.u32 %r1, [%rd2+256]; ld.global.u32 %r2, [%rd2+16]; ld.global.u32 %r3, [%rd2+272];\n\
         ld.global.u32 %r4, [%rd3]; ld.global.u32 %r5, [%rd3+16]; mov.f32 %f4, 0f00000000;\n\
         mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{%f0,%f1,%f2,%f3}}, {{%r0,%r1,%r2,%r3}}, {{%r4,%r5}}, {{%f4,%f4,%f4,%f4}};\n{STORE}"
    );

    let d = f32_values(&run(&body, &bf16_bytes(&a), &bf16_bytes(&b), 512));

    assert_eq!(d, product(&a, &b, 16));
}

#[test]
fn tf32_product_from_registers_equals_the_sum() {
    let (a, b) = (whole(16 * 8, 3), whole(8 * 8, 4));
    let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let body = format!(
        "mad.lo.u32 %r20, %g, 32, 0; mad.lo.u32 %r20, %c, 4, %r20; cvt.u64.u32 %rd1, %r20; add.u64 %rd2, %a, %rd1; add.u64 %rd3, %b, %rd1;\n\
         ld.global.u32 %r0, [%rd2]; ld.global.u32 %r1, [%rd2+256]; ld.global.u32 %r2, [%rd2+16]; ld.global.u32 %r3, [%rd2+272];\n\
         ld.global.u32 %r4, [%rd3]; ld.global.u32 %r5, [%rd3+16]; mov.f32 %f4, 0f3F800000;\n\
         mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{%f0,%f1,%f2,%f3}}, {{%r0,%r1,%r2,%r3}}, {{%r4,%r5}}, {{%f4,%f4,%f4,%f4}};\n{STORE}"
    );

    let d = f32_values(&run(&body, &bytes(&a), &bytes(&b), 512));

    let expected: Vec<f32> = product(&a, &b, 8).iter().map(|d| d + 1.0).collect();
    assert_eq!(d, expected);
}

/// Lane l copies row l of a 32 x 8 matrix of 16 bits into shared memory.
const FILL: &str = "shl.b32 %r20, %t, 4; cvt.u64.u32 %rd1, %r20; add.u64 %rd2, %a, %rd1; ld.global.v4.u32 {%r4,%r5,%r6,%r7}, [%rd2];\n\
    mov.u32 %r21, s; add.u32 %r22, %r21, %r20; st.shared.v4.u32 [%r22], {%r4,%r5,%r6,%r7}; bar.warp.sync -1;\n";

#[test]
fn ldmatrix_gives_each_lane_its_elements_and_its_transposed_ones() {
    let words: Vec<u16> = (0..256).collect();
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    for transposed in [false, true] {
        let trans = if transposed { ".trans" } else { "" };
        let body = format!(
            "{FILL}ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r0,%r1,%r2,%r3}}, [%r22];\n\
             add.u64 %rd3, %out, %rd1; st.global.v4.u32 [%rd3], {{%r0,%r1,%r2,%r3}};"
        );

        let out = run(&body, &bytes, &[0; 4], 512);

        for (at, found) in out.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).enumerate() {
            let (lane, matrix, half) = (at / 8, at / 2 % 4, at % 2);
            let (row, column) = (lane / 4, lane % 4 * 2 + half);
            let (row, column) = if transposed { (column, row) } else { (row, column) };
            assert_eq!(usize::from(found), matrix * 64 + row * 8 + column);
        }
    }
}

#[test]
fn stmatrix_undoes_ldmatrix() {
    let bytes: Vec<u8> = (0..256u16).flat_map(u16::to_le_bytes).collect();
    let body = format!(
        "{FILL}ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r0,%r1,%r2,%r3}}, [%r22];\n\
         add.u32 %r23, %r22, 512; stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r23], {{%r0,%r1,%r2,%r3}}; bar.warp.sync -1;\n\
         ld.shared.v4.u32 {{%r4,%r5,%r6,%r7}}, [%r23]; add.u64 %rd3, %out, %rd1; st.global.v4.u32 [%rd3], {{%r4,%r5,%r6,%r7}};"
    );

    assert_eq!(run(&body, &bytes, &[0; 4], 512), bytes);
}

#[test]
fn conversions_round_as_ieee_754_requires() {
    // 1 + 2^-8 lies between two bf16; 65520 rounds to infinity in f16 and saturates; 2.5 and -2.5 are ties.
    let convert = |instruction: &str, bits: u32| {
        let body = format!(
            "mov.b32 %r1, {bits}; mov.b32 %f1, %r1; mov.u32 %r2, 0; {instruction}; setp.eq.u32 %p1, %t, 0; @%p1 st.global.u32 [%out], %r2;"
        );
        let out = run(&body, &[0; 4], &[0; 4], 4);
        u32::from_le_bytes(out.try_into().unwrap())
    };
    let narrow = |kind: &str, x: f32| convert(&format!("{kind} %h1, %f1; cvt.u32.u16 %r2, %h1"), x.to_bits());

    assert_eq!(narrow("cvt.rn.bf16.f32", 1.0 + 1.0 / 256.0), 0x3f80);
    assert_eq!(narrow("cvt.rn.bf16.f32", 1.0 + 3.0 / 256.0), 0x3f82);
    assert_eq!(narrow("cvt.rz.bf16.f32", 1.0 + 3.0 / 256.0), 0x3f81);
    assert_eq!(narrow("cvt.rn.f16.f32", 65520.0), 0x7c00);
    assert_eq!(narrow("cvt.rn.satfinite.f16.f32", 65520.0), 0x7bff);
    assert_eq!(narrow("cvt.rn.f16.f32", 3e-8), 0x0001);
    assert_eq!(convert("cvt.rni.s32.f32 %r2, %f1", 2.5f32.to_bits()), 2);
    assert_eq!(convert("cvt.rzi.s32.f32 %r2, %f1", (-2.5f32).to_bits()), (-2i32) as u32);
    assert_eq!(convert("cvt.rmi.s32.f32 %r2, %f1", (-2.5f32).to_bits()), (-3i32) as u32);
    assert_eq!(convert("cvt.rzi.s32.f32 %r2, %f1", f32::NAN.to_bits()), 0);
    assert_eq!(convert("cvt.rzi.u32.f32 %r2, %f1", (-1f32).to_bits()), 0);
    assert_eq!(convert("cvt.rzi.s32.f32 %r2, %f1", 3e9f32.to_bits()), i32::MAX as u32);
    assert_eq!(convert("cvt.rna.tf32.f32 %r2, %f1", 0x3f80_1000), 0x3f80_2000);
    assert_eq!(convert("add.rz.f32 %f2, %f1, 0f33800000; mov.b32 %r2, %f2", 0x3f80_0001), 0x3f80_0001);
    assert_eq!(convert("add.rp.f32 %f2, %f1, 0f00000001; mov.b32 %r2, %f2", 0x3f80_0000), 0x3f80_0001);
    assert_eq!(convert("max.f32 %f2, %f1, 0f7FC00000; mov.b32 %r2, %f2", 0x3f80_0000), 0x3f80_0000);
    assert_eq!(convert("max.NaN.f32 %f2, %f1, 0f7FC00000; mov.b32 %r2, %f2", 0x3f80_0000), 0x7fff_ffff);
    assert_eq!(convert("mul.ftz.f32 %f2, %f1, 0f3F000000; mov.b32 %r2, %f2", 0x0080_0000), 0);
}

#[test]
fn the_same_seed_gives_the_same_findings_and_other_seeds_other_orders() {
    // Which of two warps writes first is visible in the result.
    let ptx = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 a)\n{\n.reg .b32 %r<4>; .reg .b64 %rd<4>;\n\
        ld.param.u64 %rd1, [a]; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; st.global.u32 [%rd1], %r2; ret;\n}";
    let module = Module::parse(ptx).unwrap();
    let run = |seed: u64| {
        let mut device = Device::new();
        let a = device.alloc(4);
        let kernel = module.kernel("k").unwrap().with(Options { seed, ..Options::default() });
        let run = kernel.launch(&mut device, [1, 1, 1], [64, 1, 1], 0, &[Arg::Ptr(a)]).unwrap();
        (device.bytes(a).to_vec(), run.findings)
    };

    assert!((0..8).all(|seed| run(seed) == run(seed) && run(seed).1.iter().all(|f| f.kind == Kind::GlobalRace)));
    assert!((0..8).any(|seed| run(seed).0 == [0; 4]) && (0..8).any(|seed| run(seed).0 == [1, 0, 0, 0]));
}
