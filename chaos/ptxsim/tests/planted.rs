//! One planted error of every kind, in hand-written PTX: the error is found at its line, and its correct twin has no finding.

use phalanx_ptxsim::{Arg, Device, Finding, Kind, LaunchError, Module, Options, Place};

/// Threads of a block, and blocks.
struct Shape {
    threads: u32,
    blocks: u32,
}

const ONE_WARP: Shape = Shape { threads: 32, blocks: 1 };
const TWO_WARPS: Shape = Shape { threads: 64, blocks: 1 };
const TWO_BLOCKS: Shape = Shape { threads: 32, blocks: 2 };

/// Runs a body in which `%in` and `%out` point to 64 f32 each, `%own` is the byte offset of the thread in its block, `%t` its
/// index, and `s` are 256 shared bytes. Lines of the body are lines of `planted.cu`, from 1.
fn run(shape: &Shape, body: &str) -> Vec<Finding> {
    let lines = body.trim().lines().enumerate().map(|(at, line)| format!(".loc 1 {} 0\n{line}\n", at + 1));
    let ptx = format!(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry planted(.param .u64 a, .param .u64 b)\n{{\n\
         .reg .pred %p<8>; .reg .b32 %r<32>, %t, %own, %sown; .reg .f32 %f<16>; .reg .b64 %rd<16>, %in, %out;\n\
         .shared .align 16 .b8 s[256]; .shared .align 8 .b64 bar;\n\
         ld.param.u64 %in, [a]; ld.param.u64 %out, [b];\n\
         mov.u32 %t, %tid.x; shl.b32 %own, %t, 2; mov.u32 %sown, s; add.u32 %sown, %sown, %own;\n\
         {}ret;\n}}\n.file 1 \"planted.cu\"\n",
        lines.collect::<String>()
    );
    let module = Module::parse(&ptx).unwrap();
    let mut device = Device::new();
    let values: Vec<u8> = (0..64).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let (a, b) = (device.alloc_written(&values), device.alloc(256));
    let options = Options { instructions_max: 100_000, ..Options::default() };
    let kernel = module.kernel("planted").unwrap().with(options);
    kernel
        .launch(&mut device, [shape.blocks, 1, 1], [shape.threads, 1, 1], 0, &[Arg::Ptr(a), Arg::Ptr(b)])
        .unwrap()
        .findings
}

#[track_caller]
fn assert_found(shape: &Shape, body: &str, kind: Kind, line: u32) -> Finding {
    let findings = run(shape, body);
    let text: Vec<String> = findings.iter().map(ToString::to_string).collect();
    assert!(!findings.is_empty(), "nothing found");
    assert!(findings.iter().all(|f| f.kind == kind), "{}", text.join("\n"));
    assert_eq!((findings[0].site.file.as_str(), findings[0].site.line), ("planted.cu", line), "{}", text.join("\n"));
    findings[0].clone()
}

#[track_caller]
fn assert_clean(shape: &Shape, body: &str) {
    let findings = run(shape, body);
    assert!(findings.is_empty(), "{}", findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"));
}

#[test]
fn load_beyond_an_argument_is_found_with_argument_and_byte() {
    let load =
        |offset: i32| format!("cvt.u64.u32 %rd1, %own;\nadd.u64 %rd1, %in, %rd1;\nld.global.f32 %f1, [%rd1+{offset}];");

    let finding = assert_found(&ONE_WARP, &load(132), Kind::OutOfBounds, 3);
    assert_eq!(finding.place, Some(Place::Argument { index: 0, byte: 256, bytes: 256 }));
    assert_eq!(finding.thread, [31, 0, 0]);
    let finding = assert_found(&ONE_WARP, &load(-4), Kind::OutOfBounds, 3);
    assert_eq!(finding.place, Some(Place::Argument { index: 0, byte: -4, bytes: 256 }));
    assert_clean(&ONE_WARP, &load(128));
}

#[test]
fn store_beyond_shared_memory_is_found() {
    assert_found(&ONE_WARP, "st.shared.u32 [%sown+200], %t;", Kind::OutOfBounds, 1);
    assert_clean(&ONE_WARP, "st.shared.u32 [%sown+128], %t;");
}

#[test]
fn read_of_unwritten_global_bytes_is_found() {
    let finding = assert_found(&ONE_WARP, "mov.u32 %r1, 0;\nld.global.f32 %f1, [%out+8];", Kind::UnwrittenGlobal, 2);
    assert_eq!(finding.place, Some(Place::Argument { index: 1, byte: 8, bytes: 256 }));
    assert_clean(
        &ONE_WARP,
        "setp.eq.u32 %p1, %t, 0;\n@%p1 st.global.f32 [%out+8], 0f3F800000;\nbar.sync 0;\nld.global.f32 %f1, [%out+8];",
    );
}

#[test]
fn read_of_unwritten_shared_bytes_is_found_with_its_variable() {
    let finding =
        assert_found(&ONE_WARP, "st.shared.u32 [%sown], %t;\nld.shared.u64 %rd1, [s+128];", Kind::UnwrittenShared, 2);
    assert_eq!(finding.place, Some(Place::Shared { byte: 128, variable: Some(("s".into(), 128)) }));
    assert_clean(&ONE_WARP, "st.shared.u32 [%sown], %t;\nld.shared.u32 %r1, [%sown];");
}

/// Each thread writes its word and reads the word of a thread of the other warp.
fn exchange(between: &str) -> String {
    format!(
        "st.shared.u32 [%sown], %t;\n{between}\nxor.b32 %r1, %own, 128;\nmov.u32 %r2, s;\nadd.u32 %r1, %r1, %r2;\nld.shared.u32 %r3, [%r1];"
    )
}

#[test]
fn shared_exchange_without_a_barrier_races() {
    let findings = run(&TWO_WARPS, &exchange(""));
    let kinds: Vec<Kind> = findings.iter().map(|f| f.kind).collect();
    // The warp that comes first reads what the other one has not written yet.
    assert!(
        kinds.contains(&Kind::SharedRace)
            && kinds.iter().all(|k| [Kind::SharedRace, Kind::UnwrittenShared].contains(k)),
        "{findings:?}"
    );
    let race = findings.iter().find(|f| f.kind == Kind::SharedRace).unwrap();
    let other = race.other.as_ref().unwrap();
    assert!(
        race.site.line == 6 && other.site.as_ref().unwrap().line == 1 || race.site.line == 1 && !other.is_write,
        "{race}"
    );
    assert_clean(&TWO_WARPS, &exchange("bar.sync 0;"));
    assert_clean(&TWO_WARPS, &exchange("bar.sync 3, 64;"));
    assert_clean(&TWO_WARPS, &exchange("barrier.sync.aligned 0;"));
}

#[test]
fn barrier_of_another_number_of_threads_orders_nothing() {
    let each_warp = "shr.u32 %r9, %t, 5; add.u32 %r9, %r9, 1; bar.sync %r9, 32;";
    assert!(run(&TWO_WARPS, &exchange(each_warp)).iter().any(|f| f.kind == Kind::SharedRace));
}

#[test]
fn second_write_of_a_reused_buffer_needs_its_own_barrier() {
    let reuse = |last: &str| exchange("bar.sync 0;") + last + "\nst.shared.u32 [%sown], %r3;";
    // Which of the two accesses comes second depends on the seed.
    for race in run(&TWO_WARPS, &reuse("")) {
        let other = race.other.as_ref().unwrap();
        let lines = [race.site.line, other.site.as_ref().unwrap().line];
        assert!(race.kind == Kind::SharedRace && (lines == [7, 6] || lines == [6, 7]), "{race}");
    }
    assert!(!run(&TWO_WARPS, &reuse("")).is_empty());
    assert_clean(&TWO_WARPS, &reuse("\nbar.sync 0;"));
}

#[test]
fn diverged_lanes_of_one_warp_race_until_they_converge() {
    let body = |between: &str| {
        format!(
            "setp.lt.u32 %p1, %t, 16;\n@%p1 bra LOW;\nst.shared.u32 [s], %t;\nbra.uni JOIN;\nLOW:\n{between}\nst.shared.u32 [s], %t;\nJOIN:\nmov.u32 %r1, 0;"
        )
    };
    // All lanes of one side write different values at once, too.
    assert!(run(&ONE_WARP, &body("")).iter().any(|f| f.kind == Kind::SharedRace));
    let split = "setp.eq.u32 %p1, %t, 0;\n@%p1 bra FIRST;\nsetp.eq.u32 %p2, %t, 1;\n@%p2 st.shared.u32 [s], %t;\nbra.uni JOIN;\nFIRST:\nst.shared.u32 [s], %t;\nJOIN:\nmov.u32 %r1, 0;";
    assert_found(&ONE_WARP, split, Kind::SharedRace, 7);
    let ordered = "setp.eq.u32 %p1, %t, 0;\n@!%p1 bra JOIN;\nst.shared.u32 [s], %t;\nJOIN:\nbar.warp.sync -1;\nsetp.eq.u32 %p2, %t, 1;\n@%p2 st.shared.u32 [s], %t;";
    assert_clean(&ONE_WARP, ordered);
}

#[test]
fn lanes_of_one_store_with_different_values_at_one_address_race() {
    assert_found(&ONE_WARP, "st.global.u32 [%out], %t;", Kind::GlobalRace, 1);
    assert_clean(&ONE_WARP, "mov.u32 %r1, 7;\nst.global.u32 [%out], %r1;");
}

#[test]
fn shared_atomics_do_not_race_with_each_other_but_with_loads() {
    let zero = "setp.eq.u32 %p1, %t, 0;\n@%p1 st.shared.u32 [s], 0;\nbar.sync 0;\natom.shared.add.u32 %r1, [s], 1;\n";
    assert_clean(&TWO_WARPS, &format!("{zero}bar.sync 0;\nld.shared.u32 %r2, [s];"));
    let findings = run(&TWO_WARPS, &format!("{zero}ld.shared.u32 %r2, [s];"));
    assert!(findings.iter().any(|f| f.kind == Kind::SharedRace), "{findings:?}");
}

const COPY: &str = "cvt.u64.u32 %rd1, %own;\nadd.u64 %rd1, %in, %rd1;\ncp.async.ca.shared.global [%sown], [%rd1], 4;\ncp.async.commit_group;\n";

#[test]
fn read_before_an_asynchronous_copy_is_waited_for_is_found() {
    let finding = assert_found(
        &ONE_WARP,
        &format!("{COPY}cp.async.wait_group 1;\nld.shared.f32 %f1, [%sown];"),
        Kind::CopyInFlight,
        6,
    );
    assert_eq!(finding.other.unwrap().site.unwrap().line, 3);
    assert_clean(&ONE_WARP, &format!("{COPY}cp.async.wait_group 0;\nld.shared.f32 %f1, [%sown];"));
}

#[test]
fn asynchronous_copy_of_another_warp_needs_wait_and_barrier() {
    let read = "xor.b32 %r1, %own, 128;\nmov.u32 %r2, s;\nadd.u32 %r1, %r1, %r2;\nld.shared.f32 %f1, [%r1];";
    assert_clean(&TWO_WARPS, &format!("{COPY}cp.async.wait_all;\nbar.sync 0;\n{read}"));
    let findings = run(&TWO_WARPS, &format!("{COPY}bar.sync 0;\ncp.async.wait_all;\n{read}"));
    assert!(findings.iter().any(|f| matches!(f.kind, Kind::CopyInFlight | Kind::SharedRace)), "{findings:?}");
}

#[test]
fn asynchronous_copy_fills_with_zeros_beyond_its_source_size() {
    let copy = "setp.eq.u32 %p1, %t, 0;\n@%p1 cp.async.cg.shared.global [s], [%in+16], 16, 8;\ncp.async.wait_all;\n";
    let store = "@%p1 ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [s];\n@%p1 st.global.v4.u32 [%out], {%r1, %r2, %r3, %r4};";
    assert_clean(&ONE_WARP, &format!("{copy}{store}"));
}

#[test]
fn blocks_that_write_the_same_bytes_race() {
    let store = |at: &str| {
        format!(
            "mov.u32 %r1, %ctaid.x;\nshl.b32 %r2, %r1, 7;\n{at}\ncvt.u64.u32 %rd1, %r2;\nadd.u64 %rd1, %out, %rd1;\nst.global.u32 [%rd1], %t;"
        )
    };
    let finding = assert_found(&TWO_BLOCKS, &store("mov.u32 %r2, %own;"), Kind::GlobalRace, 6);
    assert_ne!(finding.block, finding.other.unwrap().block);
    assert_clean(&TWO_BLOCKS, &store("add.u32 %r2, %r2, %own;"));
}

#[test]
fn warps_of_a_block_that_exchange_through_global_memory_need_a_barrier() {
    let body = |between: &str| {
        format!(
            "cvt.u64.u32 %rd1, %own;\nadd.u64 %rd2, %out, %rd1;\nst.global.u32 [%rd2], %t;\n{between}\nxor.b64 %rd1, %rd1, 128;\nadd.u64 %rd2, %out, %rd1;\nld.global.u32 %r1, [%rd2];"
        )
    };
    assert_clean(&TWO_WARPS, &body("bar.sync 0;"));
    let findings = run(&TWO_WARPS, &body(""));
    assert!(findings.iter().any(|f| f.kind == Kind::GlobalRace), "{findings:?}");
}

/// Each block writes a word and counts itself; the last one adds up the words of all.
fn last_block(fence: &str) -> String {
    format!(
        "mov.u32 %r1, %ctaid.x;\nmul.wide.u32 %rd1, %r1, 4;\nadd.u64 %rd1, %out, %rd1;\nsetp.ne.u32 %p1, %t, 0;\n@%p1 bra DONE;\nst.global.u32 [%rd1], %r1;\n{fence}\natom.global.add.u32 %r2, [%in], 1;\nsetp.ne.u32 %p2, %r2, 1;\n@%p2 bra DONE;\n{fence}\nld.global.u32 %r3, [%out];\nld.global.u32 %r4, [%out+4];\nDONE:\nmov.u32 %r5, 0;"
    )
}

#[test]
fn last_block_may_read_what_others_published_behind_a_fence() {
    assert_clean(&TWO_BLOCKS, &last_block("membar.gl;"));
    let findings = run(&TWO_BLOCKS, &last_block(""));
    assert!(findings.iter().any(|f| f.kind == Kind::GlobalRace), "{findings:?}");
}

#[test]
fn read_only_loads_of_bytes_that_the_launch_writes_are_found() {
    let body = |load: &str| {
        format!("cvt.u64.u32 %rd1, %own;\nadd.u64 %rd1, %in, %rd1;\nst.global.u32 [%rd1], %t;\n{load} %r1, [%rd1];")
    };
    assert_found(&ONE_WARP, &body("ld.global.nc.u32"), Kind::NonCoherentRead, 4);
    assert_clean(&ONE_WARP, &body("ld.global.u32"));
}

#[test]
fn misaligned_vector_access_is_found() {
    assert_found(&ONE_WARP, "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%in+8];", Kind::Misaligned, 1);
    assert_clean(&ONE_WARP, "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%in+16];");
}

#[test]
fn barrier_that_half_a_warp_skips_is_found() {
    let body =
        |threads: u32| format!("setp.ge.u32 %p1, %t, {threads};\n@%p1 bra SKIP;\nbar.sync 0;\nSKIP:\nmov.u32 %r1, 0;");
    assert_found(&TWO_WARPS, &body(16), Kind::BarrierDivergence, 3);
    assert_clean(&TWO_WARPS, &body(64));
}

#[test]
fn warps_at_different_barriers_are_found() {
    assert_found(&TWO_WARPS, "shr.u32 %r1, %t, 5;\nbar.sync %r1;\nmov.u32 %r2, 0;", Kind::BarrierDivergence, 2);
}

#[test]
fn whole_warps_that_exited_are_not_waited_for() {
    assert_clean(&TWO_WARPS, "setp.ge.u32 %p1, %t, 32;\n@%p1 ret;\nbar.sync 0;");
}

#[test]
fn infinite_loop_ends_with_a_finding() {
    assert_found(
        &ONE_WARP,
        "mov.u32 %r1, 0;\nLOOP:\nadd.u32 %r1, %r1, 2;\nsetp.ne.u32 %p1, %r1, 7;\n@%p1 bra LOOP;",
        Kind::InstructionLimit,
        4,
    );
    assert_clean(&ONE_WARP, "mov.u32 %r1, 0;\nLOOP:\nadd.u32 %r1, %r1, 2;\nsetp.ne.u32 %p1, %r1, 8;\n@%p1 bra LOOP;");
}

#[test]
fn shuffle_with_lanes_that_do_not_come_is_found() {
    let body = |mask: &str| {
        format!(
            "setp.ge.u32 %p1, %t, 16;\n@%p1 bra SKIP;\nshfl.sync.bfly.b32 %r1|%p2, %t, 8, 31, {mask};\nSKIP:\nmov.u32 %r1, 0;"
        )
    };
    assert_found(&ONE_WARP, &body("-1"), Kind::LaneMask, 3);
    assert_clean(&ONE_WARP, &body("65535"));
}

#[test]
fn shuffle_from_a_lane_outside_is_found() {
    let body = |from: u32| {
        format!(
            "setp.ge.u32 %p1, %t, 16;\n@%p1 bra SKIP;\nshfl.sync.idx.b32 %r1|%p2, %t, {from}, 31, 65535;\nSKIP:\nmov.u32 %r1, 0;"
        )
    };
    assert_found(&ONE_WARP, &body(20), Kind::LaneMask, 3);
    assert_clean(&ONE_WARP, &body(3));
}

#[test]
fn vote_by_a_lane_that_the_mask_omits_is_found() {
    assert_found(&ONE_WARP, "vote.sync.ballot.b32 %r1, %p1, 255;", Kind::LaneMask, 1);
    assert_clean(&ONE_WARP, "vote.sync.ballot.b32 %r1, %p1, -1;");
}

#[test]
fn trap_is_found() {
    assert_found(&ONE_WARP, "mov.u32 %r1, 0;\ntrap;", Kind::Trap, 2);
}

const INIT: &str = "setp.eq.u32 %p1, %t, 0;\nmov.u32 %r20, bar;\n@%p1 mbarrier.init.shared.b64 [bar], 1;\n@%p1 fence.mbarrier_init.release.cluster;\n";
const BULK: &str = "@!%p1 bra WAIT;\nmbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;\ncp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [%in], 256, [bar];\nWAIT:\nmov.u32 %r21, 0;\n";
const WAIT: &str = "LOOP:\nmbarrier.try_wait.parity.shared.b64 %p2, [%r20], 0;\n@!%p2 bra LOOP;\n";

#[test]
fn bulk_copy_is_readable_after_its_mbarrier_only() {
    let body = |wait: &str| format!("{INIT}bar.sync 0;\n{BULK}{wait}ld.shared.u32 %r1, [%sown];");
    assert_clean(&TWO_WARPS, &body(WAIT));
    let findings = run(&TWO_WARPS, &body(""));
    assert!(
        !findings.is_empty() && findings.iter().all(|f| matches!(f.kind, Kind::CopyInFlight | Kind::UnwrittenShared)),
        "{findings:?}"
    );
    assert!(findings.iter().any(|f| f.kind == Kind::CopyInFlight));
}

#[test]
fn mbarrier_used_without_a_barrier_after_its_initialisation_is_found() {
    let findings = run(&TWO_WARPS, &format!("{INIT}{BULK}{WAIT}ld.shared.u32 %r1, [%sown];"));
    assert!(findings.iter().any(|f| matches!(f.kind, Kind::Mbarrier | Kind::SharedRace)), "{findings:?}");
}

#[test]
fn wait_for_a_phase_that_no_one_completes_is_a_deadlock() {
    let body = format!("{INIT}bar.sync 0;\n{}{WAIT}", BULK.replace("[bar], 256;", "[bar], 512;"));
    let findings = run(&TWO_WARPS, &body);
    assert!(findings.iter().all(|f| f.kind == Kind::Deadlock) && findings.len() == 1, "{findings:?}");
}

#[test]
fn too_many_arrivals_are_found() {
    let body = |count: u32| {
        format!(
            "{}bar.sync 0;\nmbarrier.arrive.shared.b64 %rd1, [bar];",
            INIT.replace("[bar], 1", &format!("[bar], {count}"))
        )
    };
    assert_clean(&ONE_WARP, &body(32));
    assert_found(&ONE_WARP, &body(33).replace("[bar];", "[bar], 2;"), Kind::Mbarrier, 6);
}

fn bulk_store(fence: &str, wait: &str) -> String {
    format!(
        "st.shared.u32 [%sown], %t;\n{fence}\nbar.sync 0;\nsetp.ne.u32 %p1, %t, 0;\n@%p1 bra DONE;\ncp.async.bulk.global.shared::cta.bulk_group [%out], [s], 256;\ncp.async.bulk.commit_group;\n{wait}\nst.shared.u32 [s], 3;\nDONE:\nmov.u32 %r1, 0;"
    )
}

#[test]
fn bulk_store_needs_a_proxy_fence_before_and_a_wait_after() {
    let (fence, wait) = ("fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group.read 0;");
    assert_clean(&TWO_WARPS, &bulk_store(fence, wait));
    assert_found(&TWO_WARPS, &bulk_store("", wait), Kind::ProxyFence, 6);
    assert_found(&TWO_WARPS, &bulk_store(fence, ""), Kind::CopyInFlight, 9);
}

#[test]
fn unsupported_instruction_names_itself_and_its_line() {
    let ptx = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n.reg .b32 %r<3>;\nadd.frob.u32 %r1, %r1, %r2;\nret;\n}";
    let error = Module::parse(ptx).unwrap().kernel("k").err().unwrap().to_string();
    assert_eq!(error, "PTX line 7: instruction `add.frob.u32` is not supported: modifier `.frob`");
    let error = Module::parse(&ptx.replace(".frob", "")).unwrap().kernel("nope").err().unwrap().to_string();
    assert_eq!(error, "no kernel `nope` in the module, which has [\"k\"]");
    let error = Module::parse("\n.version 8.0\n;").err().unwrap().to_string();
    assert_eq!(error, "PTX line 3: expected a directive, found `;`");
}

#[test]
fn grid_beyond_the_limits_of_cuda_is_refused() {
    let ptx = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry empty(.param .u64 a, .param .u32 b)\n{\nret;\n}\n";
    let kernel = Module::parse(ptx).unwrap().kernel("empty").unwrap();
    let args = [Arg::U64(0), Arg::U32(0)];
    let launch = |grid| kernel.launch(&mut Device::new(), grid, [32, 1, 1], 0, &args);

    assert_eq!(kernel.param_bytes().collect::<Vec<usize>>(), [8, 4]);
    assert!(launch([1, 65_535, 1]).is_ok_and(|run| run.findings.is_empty()));
    assert!(matches!(launch([1, 65_536, 1]), Err(LaunchError::Shape { grid: [1, 65_536, 1], .. })));
}
