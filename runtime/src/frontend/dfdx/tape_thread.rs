//! The thread that runs tapes. A tape holds closures that are not `Send`, so it is created, recorded and run here; only
//! the module and the finished gradients are sent.

use crate::frontend::dfdx::tape::{Batch, Loss, Tape};
use dfdx::prelude::{AsArray, Backward, Cpu, Gradients};
use phalanx_device::ThreadError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// A microbatch for the tape thread.
pub(super) struct Work<M> {
    pub(super) module: Box<M>,
    /// In the order of [`crate::frontend::UserModel::INPUTS`].
    pub(super) inputs: Vec<Vec<i32>>,
    pub(super) n_rows: usize,
    pub(super) seq_len: usize,
    /// Whether gradients are requested.
    pub(super) backward: bool,
}

/// The result of a microbatch.
pub(super) struct Done<M> {
    pub(super) module: Box<M>,
    /// Summed loss, and gradients if they were requested; or the reason of the failure.
    pub(super) outcome: Result<(f64, Option<Gradients<f32, Cpu>>), String>,
}

/// The tape thread; it ends when this handle is dropped.
pub(super) struct TapeThread<M> {
    tx: SyncSender<Work<M>>,
    rx: Receiver<Done<M>>,
}

/// More than the default of 2 MiB, because a user's model may recurse deeply.
const STACK_BYTES: usize = 8 << 20;

impl<M: Send + 'static> TapeThread<M> {
    /// Starts the thread with a pool of `n_threads`, itself included, for dfdx's products and our kernels. The caller's
    /// own pool is idle while it waits for the tape thread, so the two do not compete.
    pub(super) fn start<F>(mut loss: F, n_threads: usize) -> Result<TapeThread<M>, ThreadError>
    where
        F: FnMut(&M, &Batch<'_>, Tape) -> Loss + Send + 'static,
    {
        let (tx, work_rx) = sync_channel::<Work<M>>(1);
        let (done_tx, rx) = sync_channel(1);
        let (ready_tx, ready_rx) = sync_channel(1);
        let body = move || {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(n_threads)
                .use_current_thread()
                .thread_name(|i| format!("tape-compute-{i}"))
                .build();
            let pool = match pool {
                Ok(pool) => pool,
                Err(source) => return drop(ready_tx.send(Err(ThreadError::Pool { n_threads, source: source.into() }))),
            };
            drop(ready_tx.send(Ok(())));
            pool.install(|| {
                for work in work_rx {
                    // The receiver is gone once the run has ended.
                    if done_tx.send(run(&mut loss, work)).is_err() {
                        return;
                    }
                }
            });
        };
        let thread = std::thread::Builder::new().name("dfdx-tape".into()).stack_size(STACK_BYTES);
        thread.spawn(body).map_err(ThreadError::Spawn)?;
        ready_rx.recv().expect("the thread reports before it does anything else")?;
        Ok(TapeThread { tx, rx })
    }

    /// Runs a microbatch on the tape thread and waits for its result.
    pub(super) fn run(&self, work: Work<M>) -> Result<Done<M>, String> {
        let gone = "its tape thread has ended";
        self.tx.send(work).map_err(|_| gone)?;
        self.rx.recv().map_err(|_| gone.into())
    }
}

/// Forward pass, and backward pass if requested. dfdx reports mismatched shapes by panicking, and the user's code may
/// panic, too; a panic ends the run with an error, but not the embedding program.
fn run<M, F: FnMut(&M, &Batch<'_>, Tape) -> Loss>(loss: &mut F, work: Work<M>) -> Done<M> {
    let Work { module, inputs, n_rows, seq_len, backward } = work;
    let [ids, labels, positions, doc_start] = [0, 1, 2, 3].map(|i| inputs[i].as_slice());
    let batch = Batch { ids, labels, positions, doc_start, n_rows, seq_len };
    // State that a panic left half done is dropped: the loss closure is not called again after a failed microbatch.
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let value = loss(&module, &batch, Tape::default());
        let sum = f64::from(value.array());
        let gradients = if backward { Some(value.try_backward().map_err(|e| e.to_string())?) } else { None };
        Ok((sum, gradients))
    }));
    let outcome = outcome.unwrap_or_else(|panic| Err(format!("panicked: {}", text_of(&*panic))));
    Done { module, outcome }
}

fn text_of(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}
