//! One rank of the stage `nccl`: a process that NCCL takes for a machine of its own, by `NCCL_HOSTID`, so that ranks on one GPU
//! connect as ranks of several machines do.
#![allow(unsafe_code)] // Collectives on device memory, and C functions of the driver.

use crate::driver::{Driver, call};
use crate::{apart, open};
use anyhow::{Context, Result, bail, ensure};
use half::{bf16, f16};
use phalanx_collective::tcp::collective::TcpRank;
use phalanx_collective::tcp::connect::TcpConfig;
use phalanx_collective::tcp::listener::Listener;
use phalanx_cuda::{Choice, CudaDevice};
use phalanx_device::parts::part;
use phalanx_device::world::World;
use phalanx_device::world_id::WorldId;
use phalanx_device::{Collective, CollectiveError, Device, ElementType, Operand, Operation, OperationKind, RawBuffer};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Longer than anything takes that ends.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest time after an abort until the GPU is free.
const ABORT_MAX: Duration = Duration::from_secs(10);
/// Elements of the largest operand.
const N: usize = 1003;

/// What the ranks do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Scenario {
    /// Every operation and type, against copies through host memory.
    Operations,
    /// Operations of three communicators in flight, started in one order.
    OneOrder,
    /// The same, started in opposite orders.
    OppositeOrders,
    /// Aborts while the communicator connects, while an operation is in flight, and after operations.
    Aborts,
    /// The last rank dies after an operation.
    Killed,
    /// Times and memory.
    Costs,
}

/// Arguments of the process.
#[derive(Clone, Debug, clap::Args)]
pub struct NcclRank {
    /// Folder that the ranks share.
    #[arg(long)]
    pub folder: PathBuf,
    /// Its rank.
    #[arg(long)]
    pub rank: u32,
    /// Number of ranks.
    #[arg(long)]
    pub ranks: u32,
    /// What the ranks do.
    #[arg(long, value_enum)]
    pub scenario: Scenario,
    /// How often.
    #[arg(long)]
    pub rounds: u32,
}

/// Figures by name.
pub type Figures = BTreeMap<String, f64>;

/// Runs a rank and ends its process as a rank of a job ends: without the destructors of C libraries, beside which threads that free
/// communicators crash. Its figures are in the shared folder afterwards.
///
/// # Errors
/// What differs from the expectation, or cannot run.
pub fn run(args: &NcclRank) -> Result<()> {
    let gpu = open::gpu()?.with_collectives(Choice::Nccl);
    gpu.open()?;
    let driver = Driver::open(&gpu)?;
    let [send, recv, other] = [0; 3].map(|_| driver.words(2 * N * args.ranks as usize));
    let rank = Rank { args, gpu, driver, send: send?, recv: recv?, other: other? };
    let figures = match args.scenario {
        Scenario::Operations => rank.operations(),
        Scenario::OneOrder => rank.orders(false),
        Scenario::OppositeOrders => rank.orders(true),
        Scenario::Aborts => rank.aborts(),
        Scenario::Killed => rank.killed(),
        Scenario::Costs => rank.costs(),
    }?;
    apart::write(&args.folder.join(format!("figures-{}.json", args.rank)), &serde_json::to_string(&figures)?)?;
    // SAFETY: ends the process.
    unsafe { libc::_exit(0) }
}

/// A rank: its GPU, and memory for operands.
struct Rank<'a> {
    args: &'a NcclRank,
    gpu: CudaDevice,
    driver: Driver,
    send: u64,
    recv: u64,
    other: u64,
}

/// A world of this rank, and the host communicators of its groups.
struct Joined {
    tcp: TcpRank,
    hosts: Vec<Box<dyn Collective>>,
}

impl Rank<'_> {
    /// Joins a world of `n_groups` groups of all ranks; each round has a world of its own.
    fn join(&self, round: u32, n_groups: usize) -> Result<Joined> {
        let NcclRank { folder, rank, ranks, .. } = self.args;
        let listener = Listener::bind("127.0.0.1:0".parse()?, b"secret").context("listening")?;
        let file = |rank: u32| folder.join(format!("address-{round}-{rank}"));
        apart::write(&file(*rank), &listener.local_addr().to_string())?;
        let address = |rank| Ok(apart::read(&file(rank), PATIENCE)?.parse()?);
        let addresses = (0..*ranks).map(address).collect::<Result<Vec<_>>>()?;
        let id = WorldId { job: 1, generation: u64::from(round) + 1, incarnation: 0 };
        let world = World::new(id, *ranks, vec![(0..*ranks).collect(); n_groups])?;
        let tcp = TcpRank::join(&world, *rank, &listener, &addresses, &TcpConfig::default())?;
        let host = |group| Ok(Box::new(tcp.communicator(group)?) as Box<dyn Collective>);
        let hosts = (0..n_groups).map(host).collect::<Result<_>>()?;
        Ok(Joined { tcp, hosts })
    }

    fn over_nccl(&self, host: Box<dyn Collective>) -> Result<Box<dyn Collective>, CollectiveError> {
        self.gpu.communicator(host)
    }

    fn buffer(&self, at: u64, bytes: usize) -> RawBuffer {
        if bytes == 0 { RawBuffer::EMPTY } else { RawBuffer::on_device(at as usize, bytes, 0) }
    }

    /// The operand of an operation on `n` elements, with its result at `recv`.
    fn operand(&self, kind: OperationKind, dtype: ElementType, n: usize, recv: u64) -> Operand {
        let NcclRank { rank, ranks, .. } = *self.args;
        let own = part(n, 1, ranks, rank).len();
        let (sent, received) = match kind {
            OperationKind::ReduceScatter => (n, own),
            OperationKind::AllGather => (own, n),
            OperationKind::AllToAll => (n, own * ranks as usize),
            OperationKind::Send { .. } => (n, 0),
            OperationKind::Recv { .. } => (0, n),
            _ => (n, n),
        };
        let width = dtype.bytes();
        let (send, recv) = (self.buffer(self.send, sent * width), self.buffer(recv, received * width));
        Operand { send, recv, dtype, n_elements: n }
    }

    /// Runs an operation to its end; waits for the GPU.
    fn operate(&self, group: &mut dyn Collective, kind: OperationKind, operand: Operand) -> Result<()> {
        let operation = Operation { kind, sequence: 0, unit: 1 };
        // SAFETY: the memory lives as long as the process, and nothing else accesses it before the end.
        let ticket = unsafe { group.start(&operation, &[operand]) }?;
        group.finish(ticket)?;
        self.synchronize()
    }

    fn synchronize(&self) -> Result<()> {
        let code = call!(self.driver, cuCtxSynchronize());
        ensure!(code == 0, "cuCtxSynchronize gives {code}");
        Ok(())
    }

    /// Waits until all ranks have come here.
    fn meet(&self, name: &str) -> Result<()> {
        let file = |rank: u32| self.args.folder.join(format!("{name}-{rank}"));
        apart::write(&file(self.args.rank), "")?;
        (0..self.args.ranks).try_for_each(|rank| apart::read(&file(rank), PATIENCE).map(drop))
    }

    /// Small whole numbers, whose sums are exact in every type and order.
    fn fill(&self, dtype: ElementType, seed: u32) -> Result<()> {
        let number = |i: usize| ((i as u32).wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 13) % 8;
        let numbers = (0..N * self.args.ranks as usize).map(|i| number(i) as f32);
        let bytes: Vec<u8> = numbers
            .flat_map(|x| match dtype {
                ElementType::F32 => x.to_le_bytes().to_vec(),
                ElementType::F64 => f64::from(x).to_le_bytes().to_vec(),
                ElementType::I32 => (x as i32).to_le_bytes().to_vec(),
                ElementType::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
                ElementType::Bf16 => bf16::from_f32(x).to_le_bytes().to_vec(),
            })
            .collect();
        self.driver.write(self.send, &bytes)
    }

    fn kinds(&self) -> Vec<OperationKind> {
        let last = self.args.ranks - 1;
        let (rank, by) = (self.args.rank, 1);
        let message = match rank {
            0 => Some(OperationKind::Send { to: last }),
            _ => (rank == last).then_some(OperationKind::Recv { from: 0 }),
        };
        let of_all = [
            OperationKind::AllReduce,
            OperationKind::ReduceScatter,
            OperationKind::AllGather,
            OperationKind::AllToAll,
            OperationKind::Broadcast { root: last },
            OperationKind::Shift { by },
            OperationKind::Shift { by: -by },
        ];
        of_all.into_iter().chain(message).collect()
    }

    fn operations(&self) -> Result<Figures> {
        let Joined { tcp, hosts } = self.join(0, 2)?;
        let [over_nccl, staged]: [Box<dyn Collective>; 2] =
            hosts.try_into().map_err(|_| anyhow::anyhow!("two groups"))?;
        let mut over_nccl = self.over_nccl(over_nccl)?;
        let mut staged = self.gpu.clone().with_collectives(Choice::Staged).communicator(staged)?;
        let types = [ElementType::F32, ElementType::Bf16, ElementType::F16, ElementType::F64, ElementType::I32];
        let mut n_compared = 0;
        for (dtype, n) in types.into_iter().flat_map(|dtype| [N, 96 * self.args.ranks as usize, 1].map(|n| (dtype, n)))
        {
            for kind in self.kinds() {
                self.fill(dtype, self.args.rank + n as u32)?;
                let [mine, reference] = [self.recv, self.other].map(|recv| self.operand(kind, dtype, n, recv));
                self.operate(&mut *over_nccl, kind, mine)?;
                self.operate(&mut *staged, kind, reference)?;
                let words = mine.recv.bytes().div_ceil(4);
                let [found, expected] = [self.recv, self.other].map(|at| self.driver.read(at, words));
                let bytes = mine.recv.bytes();
                let [found, expected] = [found?, expected?].map(|words| bytemuck::cast_slice(&words)[..bytes].to_vec());
                let wrong = found.iter().zip(&expected).position(|(a, b): (&u8, &u8)| a != b);
                ensure!(wrong.is_none(), "{kind:?} of {n} {dtype:?}: byte {wrong:?} of {bytes} differs");
                n_compared += usize::from(bytes > 0);
            }
        }
        self.meet("compared")?;
        drop((over_nccl, staged, tcp));
        Ok([("results".to_owned(), n_compared as f64)].into())
    }

    /// Starts a sum in each of three groups, in one order or in opposite ones, and awaits them in the other order.
    fn orders(&self, are_opposite: bool) -> Result<Figures> {
        let Joined { tcp, hosts } = self.join(0, 3)?;
        let mut groups = hosts.into_iter().map(|host| self.over_nccl(host)).collect::<Result<Vec<_>, _>>()?;
        let operand = self.operand(OperationKind::AllReduce, ElementType::I32, 64, self.recv);
        self.fill(ElementType::I32, 0)?;
        // The first operation connects the peers, which happens in one order.
        for group in &mut groups {
            self.operate(&mut **group, OperationKind::AllReduce, operand)?;
        }
        let operation = Operation { kind: OperationKind::AllReduce, sequence: 0, unit: 1 };
        for _ in 0..self.args.rounds {
            let mut order = [0, 1, 2];
            if are_opposite && self.args.rank % 2 == 1 {
                order.reverse();
            }
            let mut tickets = Vec::new();
            for i in order {
                // Each has a place of its own for its result.
                let at = self.recv + 1024 * i as u64;
                let operand = Operand { recv: self.buffer(at, operand.recv.bytes()), ..operand };
                // SAFETY: the memory lives as long as the process.
                tickets.push((i, unsafe { groups[i].start(&operation, &[operand]) }?));
            }
            for (i, ticket) in tickets.into_iter().rev() {
                groups[i].finish(ticket)?;
            }
            self.synchronize()?;
        }
        let sums = [0, 1, 2].map(|i| self.driver.read(self.recv + 1024 * i, 64));
        let [first, second, third] = [0, 1, 2].map(|i| sums[i].as_ref().ok());
        ensure!(first.is_some() && first == second && second == third, "the groups have different sums");
        self.meet("summed")?;
        drop((groups, tcp));
        Ok(Figures::new())
    }

    fn aborts(&self) -> Result<Figures> {
        let (mut n_connecting, mut longest) = (0, Duration::ZERO);
        for round in 0..self.args.rounds {
            // In the log of a process that hangs, the last line tells where.
            eprintln!("round {round} joins");
            let Joined { tcp, mut hosts } = self.join(round, 1)?;
            let host = hosts.pop().context("a group")?;
            let aborts_early = round % 3 == 0 && self.args.rank == 1;
            let connected = std::thread::scope(|scope| {
                if aborts_early {
                    let (tcp, pause) = (&tcp, Duration::from_micros(u64::from(round % 16) * 700));
                    scope.spawn(move || {
                        std::thread::sleep(pause);
                        tcp.abort("this rank leaves");
                    });
                }
                self.over_nccl(host)
            });
            eprintln!("round {round} has connected: {}", connected.is_ok());
            let begin = Instant::now();
            match (connected, round % 3) {
                (Err(CollectiveError::Aborted { .. }), 0) => n_connecting += 1,
                (Ok(mut group), _) => self.abort(&mut *group, round)?,
                (Err(error), _) => bail!("round {round}: {error}"),
            }
            eprintln!("round {round} has aborted");
            self.synchronize()?;
            longest = longest.max(begin.elapsed());
            ensure!(longest < ABORT_MAX, "round {round}: the GPU is not free after {longest:?}");
            ensure!(!self.gpu.has_failed(), "round {round}: the GPU has failed");
        }
        let figures = [("while connecting", f64::from(n_connecting)), ("longest ms", 1e3 * longest.as_secs_f64())];
        Ok(figures.map(|(name, figure)| (name.to_owned(), figure)).into())
    }

    /// Aborts a connected group: with an operation in flight that only the first rank has started, or after one of all.
    fn abort(&self, group: &mut dyn Collective, round: u32) -> Result<()> {
        let [connected, ended] = ["connected", "aborted"].map(|name| self.args.folder.join(format!("{name}-{round}")));
        let operand = self.operand(OperationKind::AllReduce, ElementType::F32, N, self.recv);
        self.fill(ElementType::F32, 0)?;
        let is_aborted =
            |outcome: &Result<(), CollectiveError>| matches!(outcome, Err(CollectiveError::Aborted { .. }));
        let operation = Operation { kind: OperationKind::AllReduce, sequence: 0, unit: 1 };
        // SAFETY: the memory lives as long as the process.
        let start = |group: &mut dyn Collective| unsafe { group.start(&operation, &[operand]) };
        match (round % 3, self.args.rank) {
            (1, 0) => {
                // Before, the abort may end the connecting of a peer that has not seen its end.
                apart::read(&connected, PATIENCE)?;
                let control = group.control();
                let outcome = std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(5));
                        control.abort("this rank leaves");
                    });
                    start(group).and_then(|ticket| group.finish(ticket))
                });
                ensure!(is_aborted(&outcome), "an operation without peers ends with {outcome:?}");
                apart::write(&ended, "")?;
            }
            (1, _) => {
                apart::write(&connected, "")?;
                apart::read(&ended, PATIENCE)?;
                // The news of the abort may come later than the file, and an operation that has been started by then waits for the rank
                // that has left. Nothing but the end of its world, which its supervisor tells, ends the wait.
                let control = group.control();
                let outcome = std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(20));
                        control.abort("the world has ended");
                    });
                    (0..2).try_for_each(|_| start(group).and_then(|ticket| group.finish(ticket)))
                });
                ensure!(outcome.is_err(), "operations of an aborted group succeed");
            }
            (2, _) => {
                // A peer may abort before this rank has awaited the sum.
                let outcome = start(group).and_then(|ticket| group.finish(ticket));
                ensure!(outcome.is_ok() || is_aborted(&outcome), "a sum ends with {outcome:?}");
                group.control().abort("this rank leaves");
            }
            _ => group.control().abort("this rank leaves"),
        }
        Ok(())
    }

    fn killed(&self) -> Result<Figures> {
        let Joined { tcp, mut hosts } = self.join(0, 1)?;
        let mut group = self.over_nccl(hosts.pop().context("a group")?)?;
        let operand = self.operand(OperationKind::AllReduce, ElementType::F32, N, self.recv);
        self.fill(ElementType::F32, 0)?;
        self.operate(&mut *group, OperationKind::AllReduce, operand)?;
        self.meet("summed")?;
        if self.args.rank == self.args.ranks - 1 {
            std::process::abort();
        }
        let begin = Instant::now();
        let Err(error) = self.operate(&mut *group, OperationKind::AllReduce, operand) else {
            bail!("a sum with a dead rank succeeds")
        };
        self.synchronize()?;
        let free = begin.elapsed();
        ensure!(free < ABORT_MAX, "the GPU is not free after {free:?}: {error:#}");
        drop((group, tcp));
        Ok([("free after ms".to_owned(), 1e3 * free.as_secs_f64())].into())
    }

    fn costs(&self) -> Result<Figures> {
        let ms = |begin: Instant| 1e3 * begin.elapsed().as_secs_f64();
        let Joined { tcp, hosts } = self.join(0, 2)?;
        self.meet("joined")?;
        let before = self.free_bytes()?;
        self.meet("measured")?;
        let begin = Instant::now();
        let mut groups = hosts.into_iter().map(|host| self.over_nccl(host)).collect::<Result<Vec<_>, _>>()?;
        let connected = ms(begin) / groups.len() as f64;
        let operand = self.operand(OperationKind::AllReduce, ElementType::F32, N, self.recv);
        self.fill(ElementType::F32, 0)?;
        let begin = Instant::now();
        for group in &mut groups {
            self.operate(&mut **group, OperationKind::AllReduce, operand)?;
        }
        let first = ms(begin) / groups.len() as f64;
        self.meet("connected")?;
        let taken = before.saturating_sub(self.free_bytes()?) as f64 / f64::from(self.args.ranks) / groups.len() as f64;
        let operation = Operation { kind: OperationKind::AllReduce, sequence: 0, unit: 1 };
        let (mut starts, begin) = (Duration::ZERO, Instant::now());
        for _ in 0..self.args.rounds {
            let start = Instant::now();
            // SAFETY: the memory lives as long as the process.
            let ticket = unsafe { groups[0].start(&operation, &[operand]) }?;
            starts += start.elapsed();
            groups[0].finish(ticket)?;
        }
        self.synchronize()?;
        let each = 1e3 * ms(begin) / f64::from(self.args.rounds);
        self.meet("timed")?;
        // The end runs on threads of its own, which have no names of theirs yet when they begin. A rank whose connections end before it
        // has left takes that for the end of the world: it aborts, and the others wait for it as long as they wait for a lost one.
        let (begin, before) = (Instant::now(), threads()?);
        drop(groups);
        self.meet("left")?;
        drop(tcp);
        while !threads()?.is_subset(&before) {
            ensure!(begin.elapsed() < ABORT_MAX, "{:?} after the end of the groups it is not done", begin.elapsed());
            std::thread::sleep(Duration::from_millis(1));
        }
        let figures = [
            ("freed after ms", ms(begin)),
            ("connect ms", connected),
            ("first operation ms", first),
            ("us a start", 1e6 * starts.as_secs_f64() / f64::from(self.args.rounds)),
            ("us an operation", each),
            ("MiB a communicator", taken / f64::from(1 << 20)),
        ];
        Ok(figures.map(|(name, figure)| (name.to_owned(), figure)).into())
    }

    fn free_bytes(&self) -> Result<usize> {
        let (mut free, mut total) = (0usize, 0usize);
        let code = call!(self.driver, cuMemGetInfo_v2(&raw mut free => *mut usize, &raw mut total => *mut usize));
        ensure!(code == 0, "cuMemGetInfo gives {code}");
        Ok(free)
    }
}

/// The threads of this process.
fn threads() -> Result<BTreeSet<OsString>> {
    let tasks = std::fs::read_dir("/proc/self/task").context("reading the threads of this process")?;
    // A thread may end meanwhile.
    Ok(tasks.filter_map(|task| Some(task.ok()?.file_name())).collect())
}
