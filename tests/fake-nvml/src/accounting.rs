//! Accounting: what each process used over its life, kept after its exit.
//!
//! Invariants: at most [`BUFFER`] processes, the one that ended longest ago goes first; a pid that comes back after
//! its exit is a new process.

use std::collections::BTreeMap;

use crate::process::{Process, share};

/// Processes kept, as a driver's default buffer.
pub(crate) const BUFFER: usize = 4000;

/// What one process used.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Account {
    pub(crate) started_us: u64,
    pub(crate) ended_us: Option<u64>,
    pub(crate) seconds: f64,
    pub(crate) busy: f64,
    pub(crate) memory_busy: f64,
    pub(crate) most_memory: u64,
}

/// Accounts by pid.
#[derive(Debug, Clone, Default)]
pub(crate) struct Accounts(pub(crate) BTreeMap<u32, Account>);

impl Accounts {
    /// Books the time from `from_us` to `to_us`, over which `processes` did not change.
    pub(crate) fn book<'a>(
        &mut self,
        processes: impl Iterator<Item = &'a Process>,
        from_us: u64,
        to_us: u64,
    ) {
        let seconds = to_us.saturating_sub(from_us) as f64 / 1e6;
        let mut running = Vec::new();
        for process in processes {
            running.push(process.pid);
            let account = self.0.entry(process.pid).or_default();
            if account.ended_us.is_some() || account.started_us == 0 {
                *account = Account {
                    started_us: from_us.max(1),
                    ..Account::default()
                };
            }
            account.seconds += seconds;
            account.busy += share(process.sm) * seconds;
            account.memory_busy += process.memory_share() * seconds;
            account.most_memory = account.most_memory.max(process.memory_bytes);
        }
        for (pid, account) in &mut self.0 {
            if account.ended_us.is_none() && !running.contains(pid) {
                account.ended_us = Some(from_us);
            }
        }
        while self.0.len() > BUFFER {
            let oldest = self
                .0
                .iter()
                .filter_map(|(pid, account)| Some((account.ended_us?, *pid)))
                .min();
            match oldest {
                Some((_, pid)) => self.0.remove(&pid),
                None => self.0.pop_first().map(|(_, account)| account),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, sm: f64) -> Process {
        Process {
            pid,
            sm,
            memory_bytes: 1 << 20,
            ..Process::default()
        }
    }

    #[test]
    fn a_pid_that_comes_back_is_a_new_process() {
        let mut accounts = Accounts::default();
        accounts.book([process(7, 0.5)].iter(), 1_000_000, 3_000_000);
        accounts.book([].iter(), 3_000_000, 4_000_000);
        assert_eq!(accounts.0[&7].ended_us, Some(3_000_000));
        assert!((accounts.0[&7].busy - 1.0).abs() < 1e-9);
        accounts.book([process(7, 1.0)].iter(), 4_000_000, 5_000_000);
        assert_eq!(accounts.0[&7].started_us, 4_000_000);
        assert!((accounts.0[&7].seconds - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_buffer_is_bounded_and_forgets_who_ended_first() {
        let mut accounts = Accounts::default();
        for pid in 1..=u32::try_from(BUFFER).unwrap() + 5 {
            let at = u64::from(pid) * 1000;
            accounts.book([process(pid, 0.1)].iter(), at, at + 1000);
        }
        assert_eq!(accounts.0.len(), BUFFER);
        assert!(!accounts.0.contains_key(&1));
    }
}
