//! What the probes are told about the driver: absent, loaded in which version, or lost.
//!
//! Inputs: what the supervisor finds, round by round. Invariants: an absent or lost driver degrades readiness and
//! never fails it, because a node whose driver is late must still be scraped; liveness fails only where a restart
//! helps (see [`super::access`]).

use std::fmt::Write as _;
use std::time::Instant;

use forewarm_runtime::status::{Condition, Fault};

use super::access::{Access, Look};
use crate::snapshot::Presence;

/// Where one GPU stands since the library was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tried {
    /// Its thread has not come to a result.
    NotYet,
    /// It answers in time.
    Up,
    /// It does not, as its last tick found.
    Down(Presence),
}

/// Tells probes.
pub(super) struct Report {
    driver: Condition,
    lost_access: Fault,
    access: Access,
    was_open: bool,
}

impl Report {
    pub(super) fn new(driver: Condition, lost_access: Fault) -> Self {
        Self {
            driver,
            lost_access,
            access: Access::default(),
            was_open: false,
        }
    }

    /// The library is not open.
    pub(super) fn closed(&mut self, reason: &str, look: Look, now: Instant) {
        let state = if self.was_open { "lost" } else { "absent" };
        self.driver.degraded(format!("{state}: {reason}"));
        self.judge(look, now);
    }

    /// The library is open, and this is where its GPUs stand, by index. Yields what that amounts to.
    pub(super) fn open(&mut self, driver_version: &str, gpus: &[Tried], now: Instant) -> Look {
        self.was_open = true;
        let (line, is_whole) = line(driver_version, gpus);
        if is_whole {
            self.driver.ready_as(line);
        } else {
            self.driver.degraded(line);
        }
        let look = Look::at(gpus.iter().copied());
        self.judge(look, now);
        look
    }

    fn judge(&mut self, look: Look, now: Instant) {
        let lost = self.access.note(look, now);
        self.lost_access.tell(lost.map(|lost| {
            format!(
                "the driver worked and has answered everything with unknown error or no permission for {} s: \
                 this container lost its device access, as after systemctl daemon-reload; only a restart helps",
                lost.as_secs()
            )
        }));
    }
}

/// The line about an open library, and whether nothing is amiss.
fn line(driver_version: &str, gpus: &[Tried]) -> (String, bool) {
    let version = if driver_version.is_empty() {
        "driver of unknown version"
    } else {
        driver_version
    };
    if gpus.is_empty() {
        return (format!("{version} loaded, no gpus"), false);
    }
    let up = gpus.iter().filter(|gpu| **gpu == Tried::Up).count();
    let mut line = format!("{version} loaded, {up} of {} gpus answer", gpus.len());
    let mut is_whole = true;
    for (index, gpu) in gpus.iter().enumerate() {
        let word = match gpu {
            Tried::Up | Tried::NotYet => continue,
            Tried::Down(Presence::Lost) => "lost",
            Tried::Down(Presence::Refused) => "refuses every call",
            Tried::Down(Presence::Failing) => "fails every call",
            Tried::Down(Presence::Answering | Presence::Unseen) => "does not answer in time",
        };
        let _infallible = write!(line, "{} gpu {index} {word}", if is_whole { ":" } else { "," });
        is_whole = false;
    }
    (line, is_whole)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forewarm_runtime::status::Status;

    use super::super::access::LONGEST_REFUSAL;

    struct Bench {
        status: Status,
        report: Report,
        now: Instant,
    }

    impl Bench {
        fn new() -> Self {
            let status = Status::new();
            let report = Report::new(
                status.readiness.condition("driver"),
                status.liveness.fault("device-access"),
            );
            let now = Instant::now();
            Self { status, report, now }
        }

        fn ready(&self) -> String {
            self.status.readiness.verdict().body(true)
        }
    }

    #[test]
    fn readiness_tells_an_absent_a_loaded_and_a_lost_driver_apart() {
        let mut bench = Bench::new();
        assert_eq!(bench.ready(), "[-]driver waiting: not started\nfailed\n");
        bench
            .report
            .closed("driver-not-loaded (9)", Look::Absent, bench.now);
        assert_eq!(
            bench.ready(),
            "[!]driver degraded: absent: driver-not-loaded (9)\nok\n"
        );
        bench
            .report
            .open("535.129.03", &[Tried::Up, Tried::NotYet], bench.now);
        assert_eq!(
            bench.ready(),
            "[+]driver ok: 535.129.03 loaded, 1 of 2 gpus answer\nok\n"
        );
        let gpus = [Tried::Up, Tried::Down(Presence::Lost)];
        bench.report.open("535.129.03", &gpus, bench.now);
        assert_eq!(
            bench.ready(),
            "[!]driver degraded: 535.129.03 loaded, 1 of 2 gpus answer: gpu 1 lost\nok\n"
        );
        bench
            .report
            .closed("driver-not-loaded (9)", Look::Absent, bench.now);
        assert_eq!(
            bench.ready(),
            "[!]driver degraded: lost: driver-not-loaded (9)\nok\n"
        );
    }

    #[test]
    fn liveness_fails_once_every_gpu_has_refused_for_a_minute_after_it_worked() {
        let mut bench = Bench::new();
        let refused = Tried::Down(Presence::Refused);
        bench
            .report
            .open("535.129.03", &[Tried::Up, Tried::Up], bench.now);
        bench.report.open("535.129.03", &[refused, refused], bench.now);
        bench
            .report
            .closed("the driver went away", Look::Unclear, bench.now);
        bench.report.closed("unknown (999)", Look::Refused, bench.now);
        assert!(
            bench.status.liveness.verdict().passed,
            "a reload may take a moment"
        );
        bench
            .report
            .closed("unknown (999)", Look::Refused, bench.now + LONGEST_REFUSAL);
        let verdict = bench.status.liveness.verdict();
        assert!(!verdict.passed);
        let body = verdict.body(false);
        assert!(
            body.contains("[-]device-access") && body.contains("lost its device access"),
            "{body}"
        );
    }

    #[test]
    fn liveness_stays_with_a_lost_gpu_or_without_a_driver() {
        let mut bench = Bench::new();
        let later = bench.now + 10 * LONGEST_REFUSAL;
        bench.report.open("535.129.03", &[Tried::Up], bench.now);
        for now in [bench.now, later] {
            bench
                .report
                .open("535.129.03", &[Tried::Down(Presence::Lost)], now);
        }
        assert!(bench.status.liveness.verdict().passed);
        for now in [later, later + 10 * LONGEST_REFUSAL] {
            bench.report.closed("driver-not-loaded (9)", Look::Absent, now);
        }
        assert!(bench.status.liveness.verdict().passed);
    }
}
