//! Capture and launch of graphs.
#![allow(unsafe_code)]

mod support;

use support::{Gpu, P, arg, cu};

const AFFINE: &str = r#"
extern "C" __global__ void affine(float* x, float factor, unsigned n) {
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) x[i] = x[i] * factor + 1;
}
"#;

struct Bench {
    gpu: Gpu,
    affine: P,
    beside: P,
}

impl Bench {
    fn new() -> Bench {
        let gpu = Gpu::new();
        let affine = gpu.kernel(AFFINE, "affine");
        let beside = gpu.new_stream();
        gpu.sync();
        Bench { gpu, affine, beside }
    }

    fn go(&self, stream: P, at: u64, factor: f32) -> u32 {
        self.gpu.launch(self.affine, stream, [1, 1, 1], 32, 0, &[arg(&at), arg(&factor), arg(&64u32)])
    }

    fn begin(&self, mode: u32) -> u32 {
        cu!(self.gpu, cuStreamBeginCapture_v2(self.gpu.stream => P, mode => u32))
    }

    fn end(&self, stream: P) -> Result<P, u32> {
        let mut graph = std::ptr::null_mut();
        match cu!(self.gpu, cuStreamEndCapture(stream => P, &raw mut graph => *mut P)) {
            0 => Ok(graph),
            code => Err(code),
        }
    }

    fn instantiate(&self, graph: P) -> P {
        let mut exec = std::ptr::null_mut();
        assert_eq!(cu!(self.gpu, cuGraphInstantiateWithFlags(&raw mut exec => *mut P, graph => P, 0 => u64)), 0);
        exec
    }

    fn fork_and_join(&self, x: u64, y: u64) -> P {
        assert_eq!(self.begin(1), 0);
        self.go(self.gpu.stream, x, 2.0);
        self.gpu.after(self.gpu.stream, self.beside);
        self.go(self.beside, y, 3.0);
        self.go(self.gpu.stream, x, 2.0);
        self.gpu.after(self.beside, self.gpu.stream);
        self.end(self.gpu.stream).unwrap()
    }
}

#[test]
fn captured_work_runs_at_each_launch_and_not_before() {
    let b = Bench::new();
    let (x, y) = (b.gpu.put(&[1f32; 64]), b.gpu.put(&[1f32; 64]));
    b.gpu.sync();
    let exec = b.instantiate(b.fork_and_join(x, y));

    let before: (Vec<f32>, Vec<f32>) = (b.gpu.get(x, 64), b.gpu.get(y, 64));
    for _ in 0..3 {
        assert_eq!(cu!(b.gpu, cuGraphLaunch(exec => P, b.gpu.stream => P)), 0);
    }
    let after: (Vec<f32>, Vec<f32>) = (b.gpu.get(x, 64), b.gpu.get(y, 64));

    assert_eq!((before.0[7], before.1[7], after.0[7], after.1[7]), (1.0, 1.0, 127.0, 40.0));
}

#[test]
fn launches_of_one_graph_do_not_overlap_whatever_the_streams() {
    let b = Bench::new();
    let (x, y) = (b.gpu.put(&[1f32; 64]), b.gpu.put(&[1f32; 64]));
    b.gpu.sync();
    let exec = b.instantiate(b.fork_and_join(x, y));

    for stream in [b.gpu.stream, b.beside, b.gpu.stream] {
        assert_eq!(cu!(b.gpu, cuGraphLaunch(exec => P, stream => P)), 0);
    }
    b.gpu.synchronize(b.beside);
    b.gpu.sync();

    assert_eq!(b.gpu.get::<f32>(x, 64)[0], 127.0);
}

#[test]
fn branches_of_a_graph_run_in_either_order() {
    let b = Bench::new();
    let mut seen = std::collections::BTreeSet::new();
    let x = b.gpu.put(&[1f32; 64]);
    b.gpu.sync();
    // A race: both branches write the same memory.
    let exec = b.instantiate(b.fork_and_join(x, x));

    for _ in 0..40 {
        let at_first = [1f32; 64];
        cu!(b.gpu, cuMemcpyHtoD_v2(x => u64, at_first.as_ptr() as P => P, 256 => usize));
        cu!(b.gpu, cuGraphLaunch(exec => P, b.gpu.stream => P));
        seen.insert(b.gpu.get::<f32>(x, 64)[0].to_bits());
    }

    assert_eq!(seen.len(), 2, "{seen:?}");
}

#[test]
fn work_that_is_not_joined_fails_the_capture() {
    let b = Bench::new();
    let x = b.gpu.put(&[1f32; 64]);
    assert_eq!(b.begin(1), 0);
    b.go(b.gpu.stream, x, 1.0);
    b.gpu.after(b.gpu.stream, b.beside);
    b.go(b.beside, x, 1.0);

    assert_eq!(b.end(b.gpu.stream), Err(904));
    assert_eq!(b.go(b.beside, x, 1.0), 0, "the streams are free again");
    b.gpu.sync();
}

#[test]
fn synchronisation_during_a_capture_fails_and_invalidates_it() {
    let b = Bench::new();
    let x = b.gpu.put(&[1f32; 64]);
    let calls: [&dyn Fn() -> u32; 3] =
        [&|| b.gpu.synchronize(b.gpu.stream), &|| cu!(b.gpu, cuStreamQuery(b.gpu.stream => P)), &|| {
            cu!(b.gpu, cuCtxSynchronize())
        }];

    for call in calls {
        assert_eq!(b.begin(1), 0);
        let (code, next) = (call(), b.go(b.gpu.stream, x, 1.0));
        assert_eq!((code, next, b.end(b.gpu.stream)), (900, 901, Err(901)));
    }
}

#[test]
fn allocation_during_a_capture_fails_unless_the_mode_is_relaxed() {
    let b = Bench::new();
    let mut at = 0u64;
    let mut codes = Vec::new();

    for mode in [0, 1, 2] {
        assert_eq!(b.begin(mode), 0);
        codes.push(cu!(b.gpu, cuMemAlloc_v2(&raw mut at => *mut u64, 4 => usize)));
        codes.push(b.end(b.gpu.stream).map_or_else(|code| code, |_| 0));
    }

    assert_eq!(codes, [900, 901, 900, 901, 0, 0]);
}

#[test]
fn capture_of_one_thread_leaves_other_threads_alone() {
    let b = Bench::new();
    let context = b.gpu.context as usize;
    let set = *b.gpu.symbol::<unsafe extern "C" fn(usize) -> u32>("cuCtxSetCurrent");
    let alloc = *b.gpu.symbol::<unsafe extern "C" fn(*mut u64, usize) -> u32>("cuMemAlloc_v2");
    let mut codes = Vec::new();

    for mode in [0, 1] {
        assert_eq!(b.begin(mode), 0);
        // SAFETY: the functions' types.
        let elsewhere = std::thread::spawn(move || unsafe {
            set(context);
            alloc(&mut 0, 4)
        });
        codes.push((elsewhere.join().unwrap(), b.end(b.gpu.stream).is_ok()));
    }

    assert_eq!(codes, [(900, false), (0, true)]);
}

#[test]
fn synchronous_copy_during_a_capture_fails() {
    let b = Bench::new();
    let (at, mut host) = (b.gpu.alloc(4), 0u32);
    let copy = |host: &mut u32| cu!(b.gpu, cuMemcpyDtoH_v2((&raw mut *host).cast() => P, at => u64, 4 => usize));

    assert_eq!(b.begin(1), 0);
    let own = (copy(&mut host), b.end(b.gpu.stream).is_ok());
    let mut blocking = std::ptr::null_mut();
    assert_eq!(cu!(b.gpu, cuStreamCreate(&raw mut blocking => *mut P, 0 => u32)), 0);
    assert_eq!(cu!(b.gpu, cuStreamBeginCapture_v2(blocking => P, 2 => u32)), 0);
    let implicit = (copy(&mut host), b.end(blocking).is_ok());

    assert_eq!((own, implicit), ((900, false), (906, true)));
}

#[test]
fn event_of_a_capture_cannot_be_waited_for_by_the_host() {
    let b = Bench::new();
    let event = b.gpu.new_event();
    assert_eq!(b.begin(1), 0);
    cu!(b.gpu, cuEventRecord(event => P, b.gpu.stream => P));

    let codes = [cu!(b.gpu, cuEventQuery(event => P)), cu!(b.gpu, cuEventSynchronize(event => P))];

    b.end(b.gpu.stream).unwrap();
    let later =
        [cu!(b.gpu, cuEventQuery(event => P)), cu!(b.gpu, cuStreamWaitEvent(b.beside => P, event => P, 0 => u32))];
    cu!(b.gpu, cuEventRecord(event => P, b.beside => P));
    let recorded_again = cu!(b.gpu, cuEventSynchronize(event => P));

    assert_eq!((codes, later, recorded_again), ([907; 2], [907; 2], 0));
}

#[test]
fn capture_may_not_depend_on_work_outside_or_on_another_capture() {
    let b = Bench::new();
    let event = b.gpu.new_event();
    cu!(b.gpu, cuEventRecord(event => P, b.beside => P));
    assert_eq!(b.begin(1), 0);
    let outside = cu!(b.gpu, cuStreamWaitEvent(b.gpu.stream => P, event => P, 0 => u32));
    let ended = b.end(b.gpu.stream);

    assert_eq!(b.begin(1), 0);
    assert_eq!(cu!(b.gpu, cuStreamBeginCapture_v2(b.beside => P, 1 => u32)), 0);
    cu!(b.gpu, cuEventRecord(event => P, b.gpu.stream => P));
    let other = cu!(b.gpu, cuStreamWaitEvent(b.beside => P, event => P, 0 => u32));

    assert_eq!((outside, ended, other), (905, Err(901), 902));
    assert_eq!((b.end(b.beside), b.end(b.gpu.stream).is_ok()), (Err(901), true));
}

#[test]
fn capture_ends_only_where_it_began() {
    let b = Bench::new();
    let gpu = &b.gpu;

    let not_begun = b.end(gpu.stream);
    assert_eq!(b.begin(1), 0);
    let again = b.begin(1);
    gpu.after(gpu.stream, b.beside);
    let elsewhere = b.end(b.beside);

    assert_eq!((not_begun, again, elsewhere, b.end(gpu.stream)), (Err(903), 900, Err(903), Err(901)));
}

#[test]
fn capture_of_one_thread_is_not_ended_by_another() {
    let b = Bench::new();
    assert_eq!(b.begin(1), 0);
    let (stream, context) = (b.gpu.stream as usize, b.gpu.context as usize);
    let (set, end) = (
        b.gpu.symbol::<unsafe extern "C" fn(usize) -> u32>("cuCtxSetCurrent"),
        b.gpu.symbol::<unsafe extern "C" fn(usize, *mut usize) -> u32>("cuStreamEndCapture"),
    );
    let (set, end) = (*set, *end);

    // SAFETY: the functions' types.
    let code = std::thread::spawn(move || unsafe {
        set(context);
        end(stream, &mut 0)
    })
    .join()
    .unwrap();

    assert_eq!(code, 908);
    assert!(b.end(b.gpu.stream).is_ok());
}

#[test]
fn destroyed_graphs_are_gone_and_their_launches_go_on() {
    let b = Bench::new();
    let (x, y) = (b.gpu.put(&[1f32; 64]), b.gpu.put(&[1f32; 64]));
    b.gpu.sync();
    let graph = b.fork_and_join(x, y);
    let exec = b.instantiate(graph);
    let (graphs, execs) = (b.gpu.stat("graphs"), b.gpu.stat("graph_execs"));
    let mut nodes = 0usize;
    let none = std::ptr::null_mut::<P>();
    assert_eq!(cu!(b.gpu, cuGraphGetNodes(graph => P, none => *mut P, &raw mut nodes => *mut usize)), 0);

    assert_eq!(cu!(b.gpu, cuGraphLaunch(exec => P, b.gpu.stream => P)), 0);
    let codes = [
        cu!(b.gpu, cuGraphExecDestroy(exec => P)),
        cu!(b.gpu, cuGraphDestroy(graph => P)),
        cu!(b.gpu, cuGraphLaunch(exec => P, b.gpu.stream => P)),
        cu!(b.gpu, cuGraphDestroy(graph => P)),
    ];

    assert_eq!((nodes, codes, b.gpu.get::<f32>(x, 1)), (3, [0, 0, 400, 1], vec![7.0]));
    assert_eq!((b.gpu.stat("graphs"), b.gpu.stat("graph_execs")), (graphs - 1, execs - 1));
}
