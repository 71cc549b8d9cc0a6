//! Which cores each rank runs on, and with how many threads.
//!
//! Every rank gets the same number of cores, `cores / ranks` rounded down: ranks wait for each other in every step, so a
//! rank with one core more would only wait longer. Cores left over stay free for the launcher and the system. Neighbouring
//! cores go to one rank, since they share caches. Where there are more ranks than cores, nobody is bound to a core and each
//! rank has one thread; the same where the process may use less time than its cores have (a quota), because then it
//! does not own the cores that it may run on.

use super::error::LaunchError;
use super::sys;

/// Where the ranks of a machine run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cores {
    /// For each rank the cores it is bound to; empty where it is not.
    bound: Vec<Vec<usize>>,
    n_threads: usize,
}

impl Cores {
    /// Splits the cores that this process may use among `n_ranks`, and binds them when `bind`. Two jobs that bind on one
    /// machine would get the same cores: bind only where the job has the machine to itself.
    ///
    /// # Errors
    /// When the system does not say which cores there are.
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

    /// Ranks among which the cores are split.
    pub fn n_ranks(&self) -> u32 {
        self.bound.len() as u32
    }

    /// Threads that every rank should compute with.
    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// The cores that a rank is bound to; empty where it is not bound, or there is no such rank.
    pub fn of(&self, rank: u32) -> &[usize] {
        self.bound.get(rank as usize).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_get_as_many_neighbouring_cores_each_and_the_rest_stays_free() {
        let cores = Cores::split(&[0, 1, 2, 3, 8, 9, 10, 11], 3, true);

        assert_eq!([cores.of(0), cores.of(1), cores.of(2)], [[0, 1], [2, 3], [8, 9]]);
        assert_eq!(cores.n_threads(), 2);
    }

    #[test]
    fn more_ranks_than_cores_are_not_bound_and_have_a_thread_each() {
        let cores = Cores::split(&[4, 5], 3, true);

        assert_eq!((cores.of(0), cores.of(2), cores.n_threads()), (&[][..], &[][..], 1));
    }

    #[test]
    fn ranks_that_are_not_to_be_bound_still_share_the_cores() {
        let cores = Cores::split(&[0, 1, 2, 3], 2, false);

        assert_eq!((cores.of(0), cores.n_threads()), (&[][..], 2));
    }

    #[test]
    fn this_process_has_cores() {
        let cores = Cores::of_this_process(1, true).unwrap();

        assert!(cores.n_threads() >= 1);
    }
}
