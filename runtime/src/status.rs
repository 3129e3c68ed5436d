//! Readiness and liveness, each with the name of what is missing.
//!
//! Inputs: programs take conditions and heartbeats before their tasks start and move them as facts arrive.
//! Invariants: readiness is earned by first events, so a condition starts as waiting and a program without
//! conditions is not ready; liveness means that each registered loop still ticks, whatever it finds.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Readiness and liveness of one program.
#[derive(Debug, Clone, Default)]
pub struct Status {
    /// May clients be sent here?
    pub readiness: Readiness,
    /// Does every loop still tick?
    pub liveness: Liveness,
}

impl Status {
    /// No conditions and no heartbeats yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

/// What a probe is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Whether the probe passes.
    pub passed: bool,
    /// One line for each condition or loop: `[+]name ok`, `[+]name ok: detail`, `[!]name degraded: reason` or
    /// `[-]name reason`.
    pub lines: Vec<String>,
}

impl Verdict {
    /// The body of a probe's answer: everything when verbose, else only what is missing.
    #[must_use]
    pub fn body(&self, verbose: bool) -> String {
        let mut body = String::new();
        for line in self
            .lines
            .iter()
            .filter(|line| verbose || line.starts_with("[-]"))
        {
            let _infallible = writeln!(body, "{line}");
        }
        body.push_str(if self.passed { "ok\n" } else { "failed\n" });
        body
    }
}

// === impl Readiness ===

/// The set of named conditions that must all be ready.
#[derive(Debug, Clone, Default)]
pub struct Readiness {
    conditions: Arc<Mutex<BTreeMap<&'static str, State>>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Ready,
    ReadyAs(String),
    Degraded(String),
    Waiting(String),
}

impl State {
    const fn passes(&self) -> bool {
        !matches!(self, Self::Waiting(_))
    }
}

/// One named condition of readiness. Clones move the same condition.
#[derive(Debug, Clone)]
pub struct Condition {
    name: &'static str,
    of: Readiness,
}

impl Readiness {
    /// No conditions yet, so not ready.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a condition, waiting until told otherwise. The same name is the same condition.
    #[must_use]
    pub fn condition(&self, name: &'static str) -> Condition {
        lock(&self.conditions)
            .entry(name)
            .or_insert_with(|| State::Waiting("not started".to_owned()));
        Condition {
            name,
            of: self.clone(),
        }
    }

    /// Whether every condition is ready.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let conditions = lock(&self.conditions);
        !conditions.is_empty() && conditions.values().all(State::passes)
    }

    /// The state of each condition by name.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let conditions = lock(&self.conditions);
        if conditions.is_empty() {
            return Verdict {
                passed: false,
                lines: vec!["[-]startup no condition is registered yet".to_owned()],
            };
        }
        Verdict {
            passed: conditions.values().all(State::passes),
            lines: conditions
                .iter()
                .map(|(name, state)| match state {
                    State::Ready => format!("[+]{name} ok"),
                    State::ReadyAs(detail) => format!("[+]{name} ok: {detail}"),
                    State::Degraded(reason) => format!("[!]{name} degraded: {reason}"),
                    State::Waiting(reason) => format!("[-]{name} waiting: {reason}"),
                })
                .collect(),
        }
    }
}

impl Condition {
    /// The condition holds.
    pub fn ready(&self) {
        self.set(State::Ready);
    }

    /// The condition holds, and this is worth telling with it.
    pub fn ready_as(&self, detail: impl Into<String>) {
        self.set(State::ReadyAs(detail.into()));
    }

    /// The condition holds well enough to serve, yet something is missing. Does not fail readiness.
    pub fn degraded(&self, reason: impl Into<String>) {
        self.set(State::Degraded(reason.into()));
    }

    /// The condition does not hold, for this reason.
    pub fn waiting(&self, reason: impl Into<String>) {
        self.set(State::Waiting(reason.into()));
    }

    /// Whether the condition holds now.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        lock(&self.of.conditions)
            .get(self.name)
            .is_some_and(State::passes)
    }

    fn set(&self, new: State) {
        let old = lock(&self.of.conditions).insert(self.name, new.clone());
        if old.as_ref() == Some(&new) {
            return;
        }
        match new {
            State::Ready => tracing::info!(condition = self.name, "condition is ready"),
            State::ReadyAs(detail) => tracing::info!(condition = self.name, detail, "condition is ready"),
            State::Degraded(reason) => tracing::warn!(condition = self.name, reason, "condition is degraded"),
            State::Waiting(reason) => tracing::info!(condition = self.name, reason, "condition is waiting"),
        }
    }
}

// === impl Liveness ===

/// The set of loops that must keep ticking, and of faults that only a restart cures.
#[derive(Debug, Clone, Default)]
pub struct Liveness {
    loops: Arc<Mutex<BTreeMap<&'static str, Pulse>>>,
    faults: Arc<Mutex<BTreeMap<&'static str, Option<String>>>>,
}

#[derive(Debug, Clone, Copy)]
struct Pulse {
    last: Instant,
    max_silence: Duration,
}

/// Told on each round of one loop; when dropped, the loop has ended and is watched no more.
#[derive(Debug)]
pub struct Heartbeat {
    name: &'static str,
    of: Liveness,
}

/// Something that can go wrong in a way that only a restart cures: fails liveness while a reason is told.
#[derive(Debug, Clone)]
pub struct Fault {
    name: &'static str,
    of: Liveness,
}

impl Fault {
    /// There is a fault, for this reason, or none.
    pub fn tell(&self, reason: Option<String>) {
        let old = lock(&self.of.faults).insert(self.name, reason.clone());
        match (old.flatten(), reason) {
            (None, Some(reason)) => tracing::error!(fault = self.name, reason, "only a restart helps"),
            (Some(_), None) => tracing::info!(fault = self.name, "fault is over"),
            _ => {}
        }
    }
}

impl Liveness {
    /// No loops yet, so alive.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Watches a loop from now on: it fails liveness once it is silent for longer than `max_silence`.
    #[must_use]
    pub fn heartbeat(&self, name: &'static str, max_silence: Duration) -> Heartbeat {
        let last = Instant::now();
        lock(&self.loops).insert(name, Pulse { last, max_silence });
        Heartbeat {
            name,
            of: self.clone(),
        }
    }

    /// Registers a fault; there is none until one is told. The same name is the same fault.
    #[must_use]
    pub fn fault(&self, name: &'static str) -> Fault {
        lock(&self.faults).entry(name).or_default();
        Fault {
            name,
            of: self.clone(),
        }
    }

    /// The state of each loop and fault by name.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.verdict_at(Instant::now())
    }

    fn verdict_at(&self, now: Instant) -> Verdict {
        let mut passed = true;
        let mut lines: Vec<_> = lock(&self.loops)
            .iter()
            .map(|(name, pulse)| {
                let silence = now.saturating_duration_since(pulse.last);
                if silence <= pulse.max_silence {
                    return format!("[+]{name} ok");
                }
                passed = false;
                format!(
                    "[-]{name} silent for {:.1} s, at most {:.1} s allowed",
                    silence.as_secs_f64(),
                    pulse.max_silence.as_secs_f64()
                )
            })
            .collect();
        for (name, reason) in lock(&self.faults).iter() {
            lines.push(match reason {
                None => format!("[+]{name} ok"),
                Some(reason) => {
                    passed = false;
                    format!("[-]{name} {reason}")
                }
            });
        }
        Verdict { passed, lines }
    }
}

impl Heartbeat {
    /// The loop has done another round.
    pub fn beat(&self) {
        if let Some(pulse) = lock(&self.of.loops).get_mut(self.name) {
            pulse.last = Instant::now();
        }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        lock(&self.of.loops).remove(self.name);
    }
}

/// A panic elsewhere must not take the probes with it: the maps stay whole between statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_registered_is_not_ready() {
        assert!(!Readiness::new().is_ready());
        assert!(!Readiness::new().verdict().passed);
    }

    #[test]
    fn readiness_names_what_it_waits_for() {
        let readiness = Readiness::new();
        let pods = readiness.condition("pods");
        let targets = readiness.condition("targets");
        pods.ready();
        targets.waiting("1 of 3 tried");
        let verdict = readiness.verdict();
        assert!(!verdict.passed);
        assert_eq!(verdict.body(false), "[-]targets waiting: 1 of 3 tried\nfailed\n");
        assert_eq!(
            verdict.body(true),
            "[+]pods ok\n[-]targets waiting: 1 of 3 tried\nfailed\n"
        );

        targets.ready();
        assert!(readiness.is_ready() && readiness.verdict().passed);
        assert_eq!(readiness.verdict().body(false), "ok\n");

        pods.waiting("watch lost");
        assert!(!readiness.is_ready() && !pods.is_ready() && targets.is_ready());
    }

    #[test]
    fn a_degraded_condition_passes_and_says_what_is_missing() {
        let readiness = Readiness::new();
        let rights = readiness.condition("rights");
        rights.degraded("may not list pods");
        let verdict = readiness.verdict();
        assert!(verdict.passed && readiness.is_ready() && rights.is_ready());
        assert_eq!(verdict.body(false), "ok\n");
        assert_eq!(verdict.body(true), "[!]rights degraded: may not list pods\nok\n");
    }

    #[test]
    fn one_name_is_one_condition() {
        let readiness = Readiness::new();
        readiness.condition("pods").ready();
        assert!(readiness.condition("pods").is_ready());
    }

    #[test]
    fn a_ready_condition_may_tell_more() {
        let readiness = Readiness::new();
        readiness.condition("driver").ready_as("580.95.05 loaded");
        assert!(readiness.is_ready());
        assert_eq!(
            readiness.verdict().body(true),
            "[+]driver ok: 580.95.05 loaded\nok\n"
        );
    }

    #[test]
    fn a_fault_fails_liveness_with_its_reason_until_it_is_over() {
        let liveness = Liveness::new();
        let access = liveness.fault("access");
        assert_eq!(liveness.verdict().body(true), "[+]access ok\nok\n");
        access.tell(Some("refused".to_owned()));
        assert_eq!(liveness.verdict().body(false), "[-]access refused\nfailed\n");
        assert!(!liveness.verdict().passed);
        access.tell(None);
        assert!(liveness.verdict().passed);
    }

    #[test]
    fn liveness_names_the_silent_loop() {
        let liveness = Liveness::new();
        let fast = liveness.heartbeat("poll-0", Duration::from_secs(5));
        let _slow = liveness.heartbeat("config", Duration::from_secs(60));
        let later = Instant::now() + Duration::from_secs(10);
        assert!(liveness.verdict().passed);
        let verdict = liveness.verdict_at(later);
        assert!(!verdict.passed);
        assert!(
            verdict.body(false).contains("[-]poll-0 silent for"),
            "{}",
            verdict.body(false)
        );
        assert!(verdict.body(true).contains("[+]config ok"));

        drop(fast);
        assert!(liveness.verdict_at(later).passed);
    }

    #[test]
    fn a_beat_ends_the_silence() {
        let liveness = Liveness::new();
        let beat = liveness.heartbeat("loop", Duration::ZERO);
        let later = Instant::now() + Duration::from_millis(1);
        assert!(!liveness.verdict_at(later).passed);
        while Instant::now() <= later {
            std::hint::spin_loop();
        }
        beat.beat();
        assert!(liveness.verdict_at(later).passed);
    }
}
