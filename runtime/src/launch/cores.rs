//! The cores and the number of threads of each rank.
//!
//! Every rank gets the same number of cores, `cores / ranks` rounded down: ranks wait for each other in every step, so a
//! rank with one core more would only wait longer. Remaining cores stay free for the launcher and the system. Neighbouring
//! cores go to one rank, because they share caches. With more ranks than cores, no rank is bound and each rank has one
//! thread. Ranks are not bound either if a quota limits the CPU time of the process to less than that of its cores.

use super::error::LaunchError;
use super::sys;

/// The cores of the ranks of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cores {
    /// For each rank the cores to which it is bound; empty if it is not bound.
    bound: Vec<Vec<usize>>,
    n_threads: usize,
}

impl Cores {
    /// Splits the cores of this process among `n_ranks`, and binds the ranks if `bind`. Two jobs that bind on one machine
    /// would get the same cores, so bind only if the job has the machine to itself.
    ///
    /// # Errors
    /// When the system does not report the cores.
    pub fn of_this_process(n_ranks: u32, bind: bool) -> Result<Self, LaunchError> {
        let cpus =
            sys::allowed_cpus().map_err(|error| LaunchError::system("read the cores of this process", &error))?;
        let n_usable = std::thread::available_parallelism().map_or(1, usize::from).min(cpus.len());
        let owns = n_usable == cpus.len();
        Ok(Self::split(&cpus[..n_usable], n_ranks, bind && owns))
    }

    /// Splits these cores.
    ///
    /// # Panics
    /// When there are no ranks.
    pub fn split(cpus: &[usize], n_ranks: u32, bind: bool) -> Self {
        assert!(n_ranks > 0, "cores cannot be split among no ranks");
        let n_each = cpus.len() / n_ranks as usize;
        let share = |rank: u32| {
            let start = rank as usize * n_each;
            if bind { cpus[start..start + n_each].to_vec() } else { Vec::new() }
        };
        Self { bound: (0..n_ranks).map(share).collect(), n_threads: n_each.max(1) }
    }

    /// Number of ranks that share the cores.
    pub fn n_ranks(&self) -> u32 {
        self.bound.len() as u32
    }

    /// Compute threads of every rank.
    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// The cores to which a rank is bound; empty if it is not bound or does not exist.
    pub fn of(&self, rank: u32) -> &[usize] {
        self.bound.get(rank as usize).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_get_equal_runs_of_neighbouring_cores_and_the_rest_stays_free() {
        let cores = Cores::split(&[0, 1, 2, 3, 8, 9, 10, 11], 3, true);

        assert_eq!([cores.of(0), cores.of(1), cores.of(2)], [[0, 1], [2, 3], [8, 9]]);
        assert_eq!(cores.n_threads(), 2);
    }

    #[test]
    fn ranks_that_outnumber_the_cores_are_unbound_with_one_thread_each() {
        let cores = Cores::split(&[4, 5], 3, true);

        assert_eq!((cores.of(0), cores.of(2), cores.n_threads()), (&[][..], &[][..], 1));
    }

    #[test]
    fn unbound_ranks_still_share_the_cores() {
        let cores = Cores::split(&[0, 1, 2, 3], 2, false);

        assert_eq!((cores.of(0), cores.n_threads()), (&[][..], 2));
    }

    #[test]
    fn this_process_has_cores() {
        let cores = Cores::of_this_process(1, true).unwrap();

        assert!(cores.n_threads() >= 1);
    }
}
