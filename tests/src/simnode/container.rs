//! One container of a simulated pod: waiting, running, ended, and again.
//!
//! ```text
//! Waiting ──start──► Running ──exit, failed probe──► Ended ──restart policy, back-off──► Waiting
//! ```
//! The pod's worker calls [`Machine::start`] while the container waits and [`Machine::tick`] ten times a
//! second; nothing here blocks. A program's end, a workload's exit code and a failed liveness probe all
//! end it the same way.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Container;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::Run;
use super::launcher;
use super::probe::Probes;
use super::workload::{GpuLoad, Progress, Tick, Workload, WorkloadContext};
use crate::child::{Child, tail};

/// First pause before a restart. The kubelet begins at 10 s; a test that needs a restart need not wait that long.
const FIRST_BACK_OFF: Duration = Duration::from_secs(1);
/// Longest pause before a restart.
const LONGEST_BACK_OFF: Duration = Duration::from_secs(10);
/// A run this long counts as a success and resets the pause.
const GOOD_RUN: Duration = Duration::from_secs(60);
/// Limit of a termination message, the kubelet's.
const MESSAGE_LIMIT: u64 = 4096;
/// Exit code of a container that was killed.
const KILLED: i32 = 137;

/// Everything that is needed to start the container once.
#[derive(Debug)]
pub(super) enum Launch {
    /// A real process.
    Program {
        /// What the launcher reads.
        description: launcher::Container,
        /// Folder for description, log and termination message.
        folder: PathBuf,
    },
    /// In this process.
    Workload(WorkloadContext),
}

enum Body {
    Program(Child),
    // The lock is never contended: it makes the machine Sync, which workloads need not be.
    Workload {
        workload: Mutex<Box<dyn Workload>>,
        progress: Progress,
    },
}

enum State {
    Waiting {
        reason: &'static str,
        message: String,
    },
    Running {
        since: Timestamp,
        started: Instant,
        body: Body,
        probes: Option<Probes>,
    },
    Ended(Ended),
}

#[derive(Debug, Clone)]
struct Ended {
    exit: i32,
    signal: Option<i32>,
    reason: &'static str,
    message: String,
    started: Timestamp,
    finished: Timestamp,
}

/// The life of one container.
pub(super) struct Machine {
    spec: Container,
    run: Option<Run>,
    state: State,
    last: Option<Ended>,
    restarts: u32,
    back_off: Duration,
    resume: Option<Instant>,
    terminating: bool,
}

/// What the API server knows of the pod, for [`Tick`].
#[derive(Debug, Clone, Copy)]
pub(super) struct PodView {
    pub(super) ready: bool,
}

impl Machine {
    pub(super) fn new(spec: Container, run: Option<Run>) -> Self {
        Self {
            spec,
            run,
            state: State::Waiting {
                reason: "ContainerCreating",
                message: String::new(),
            },
            last: None,
            restarts: 0,
            back_off: FIRST_BACK_OFF,
            resume: None,
            terminating: false,
        }
    }

    pub(super) fn spec(&self) -> &Container {
        &self.spec
    }

    /// How its image runs; `None` for an image that the node does not know.
    pub(super) fn run(&self) -> Option<&Run> {
        self.run.as_ref()
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self.state, State::Running { .. })
    }

    /// Whether it has run at all.
    pub(super) fn has_run(&self) -> bool {
        self.last.is_some() || !matches!(self.state, State::Waiting { .. })
    }

    pub(super) fn wants_start(&self, now: Instant) -> bool {
        !self.terminating
            && matches!(self.state, State::Waiting { .. })
            && self.resume.is_none_or(|resume| now >= resume)
    }

    /// Exit code once it has ended for good or for now.
    pub(super) fn exit_code(&self) -> Option<i32> {
        match &self.state {
            State::Ended(ended) => Some(ended.exit),
            _ => None,
        }
    }

    /// Process id of a running program.
    pub(super) fn pid(&self) -> Option<u32> {
        match &self.state {
            State::Running {
                body: Body::Program(child),
                ..
            } => Some(child.pid()),
            _ => None,
        }
    }

    pub(super) fn has_started(&self) -> bool {
        match &self.state {
            State::Running { probes, .. } => probes.as_ref().is_none_or(|probes| probes.findings().started()),
            _ => false,
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        match &self.state {
            State::Running {
                body: Body::Workload { progress, .. },
                ..
            } => progress.ready,
            State::Running { probes, .. } => probes.as_ref().is_none_or(|probes| probes.findings().ready()),
            _ => false,
        }
    }

    /// Says what it waits for.
    pub(super) fn wait_for(&mut self, reason: &'static str, message: String) {
        if let State::Waiting { .. } = self.state {
            self.state = State::Waiting { reason, message };
        }
    }

    /// Starts it once.
    pub(super) fn start(&mut self, launch: Launch, pod: std::net::Ipv4Addr) {
        let (since, started) = (Timestamp::now(), Instant::now());
        let body = match (&self.run, launch) {
            (Some(Run::Workload(factory)), Launch::Workload(context)) => {
                factory.start(context).map(|workload| Body::Workload {
                    workload: Mutex::new(workload),
                    progress: Progress::default(),
                })
            }
            (Some(Run::Program { .. }), Launch::Program { description, folder }) => {
                start_program(&self.spec.name, &description, &folder).map(Body::Program)
            }
            _ => Err("the image does not run this way".to_owned()),
        };
        match body {
            Ok(body) => {
                // A workload has no port to probe: its `Progress::ready` stands for the readiness probe.
                let probes = matches!(body, Body::Program(_)).then(|| Probes::start(&self.spec, pod));
                self.state = State::Running {
                    since,
                    started,
                    body,
                    probes,
                };
            }
            Err(message) => self.end(Ended {
                exit: i32::from(launcher::CANNOT_RUN),
                signal: None,
                reason: "StartError",
                message,
                started: since,
                finished: since,
            }),
        }
    }

    /// Looks after it; returns the load on its GPUs, in the order of its devices.
    pub(super) fn tick(&mut self, now: Instant, pod: PodView) -> Vec<GpuLoad> {
        let terminating = self.terminating;
        let State::Running {
            since,
            started,
            body,
            probes,
        } = &mut self.state
        else {
            return Vec::new();
        };
        let since = *since;
        let ended = |exit: i32, signal: Option<i32>, message: String| Ended {
            exit,
            signal,
            reason: if exit == 0 { "Completed" } else { "Error" },
            message,
            started: since,
            finished: Timestamp::now(),
        };
        let mut loads = Vec::new();
        let mut over = match body {
            Body::Program(child) => child.exited().map(|status| {
                let exit = status
                    .code()
                    .unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
                ended(
                    exit,
                    status.signal(),
                    termination_message(&self.spec, child, exit),
                )
            }),
            Body::Workload { workload, progress } => {
                let running_for = now.saturating_duration_since(*started);
                let workload = workload.get_mut().unwrap_or_else(PoisonError::into_inner);
                *progress = workload.tick(&Tick {
                    now,
                    running_for,
                    ready: pod.ready,
                    terminating,
                });
                loads.clone_from(&progress.gpus);
                progress.exit.map(|exit| ended(exit, None, String::new()))
            }
        };
        if over.is_none()
            && !terminating
            && probes
                .as_ref()
                .is_some_and(|probes| probes.findings().condemned())
        {
            if let Body::Program(child) = body {
                child.kill();
            }
            over = Some(ended(
                KILLED,
                Some(9),
                "a start-up or liveness probe failed".to_owned(),
            ));
        }
        if let Some(over) = over {
            self.end(over);
            return Vec::new();
        }
        loads
    }

    /// Puts an ended container back into the queue, when the restart policy says so.
    pub(super) fn restart(&mut self, policy: &str, now: Instant) {
        let State::Ended(ended) = &self.state else { return };
        let again = match policy {
            "Always" => true,
            "OnFailure" => ended.exit != 0,
            _ => false,
        };
        if self.terminating || !again {
            return;
        }
        let run = ended.finished.duration_since(ended.started).unsigned_abs();
        if run >= GOOD_RUN {
            self.back_off = FIRST_BACK_OFF;
        }
        self.last = Some(ended.clone());
        self.restarts += 1;
        self.resume = Some(now + self.back_off);
        let message = format!(
            "back-off {:?} restarting failed container={}",
            self.back_off, self.spec.name
        );
        self.back_off = (self.back_off * 2).min(LONGEST_BACK_OFF);
        self.state = State::Waiting {
            reason: "CrashLoopBackOff",
            message,
        };
    }

    /// SIGTERM.
    pub(super) fn ask_to_end(&mut self) {
        if !std::mem::replace(&mut self.terminating, true)
            && let State::Running {
                body: Body::Program(child),
                ..
            } = &mut self.state
        {
            child.signal(Signal::SIGTERM);
        }
    }

    /// SIGKILL.
    pub(super) fn kill(&mut self) {
        self.terminating = true;
        if let State::Running { since, body, .. } = &mut self.state {
            let started = *since;
            if let Body::Program(child) = body {
                child.kill();
            }
            let (exit, signal) = (KILLED, Some(9));
            let finished = Timestamp::now();
            self.end(Ended {
                exit,
                signal,
                reason: "Error",
                message: String::new(),
                started,
                finished,
            });
        }
    }

    fn end(&mut self, ended: Ended) {
        self.state = State::Ended(ended);
    }

    /// The container's part of the pod's status.
    pub(super) fn status(&self) -> Value {
        let state = match &self.state {
            State::Waiting { reason, message } => json!({"waiting": {"reason": reason, "message": message}}),
            State::Running { since, .. } => json!({"running": {"startedAt": seconds(*since)}}),
            State::Ended(ended) => ended.status(),
        };
        let image = self.spec.image.clone().unwrap_or_default();
        json!({
            "name": self.spec.name,
            "image": image,
            "imageID": format!("simulated://{image}"),
            "containerID": format!("simulated://{}/{}", self.spec.name, self.restarts),
            "ready": self.is_ready(),
            "started": self.has_started(),
            "restartCount": self.restarts,
            "state": state,
            "lastState": self.last.as_ref().map_or_else(|| json!({}), Ended::status),
        })
    }
}

impl Ended {
    fn status(&self) -> Value {
        json!({"terminated": {
            "exitCode": self.exit,
            "signal": self.signal,
            "reason": self.reason,
            "message": self.message,
            "startedAt": seconds(self.started),
            "finishedAt": seconds(self.finished),
        }})
    }
}

/// A time as the API has it: RFC 3339 in UTC, whole seconds.
pub(super) fn seconds(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn start_program(
    name: &str,
    description: &launcher::Container,
    folder: &std::path::Path,
) -> Result<Child, String> {
    let start = || -> std::io::Result<Child> {
        fs::create_dir_all(&description.root)?;
        let file = folder.join("container.json");
        fs::write(&file, serde_json::to_vec(description)?)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(launcher::ARGUMENT).arg(&file);
        Child::start(name, command, &folder.join("log"))
    };
    start().map_err(|error| error.to_string())
}

/// What the program left in its termination message file, or the end of its log where the spec says so.
fn termination_message(spec: &Container, child: &Child, exit: i32) -> String {
    let file = child.log().with_file_name("termination-log");
    let message = fs::read_to_string(file).unwrap_or_default();
    let fall_back = spec.termination_message_policy.as_deref() == Some("FallbackToLogsOnError");
    let message = if message.is_empty() && exit != 0 && (fall_back || exit == i32::from(launcher::CANNOT_RUN))
    {
        tail(child.log(), MESSAGE_LIMIT / 2)
    } else {
        message
    };
    message.chars().take(MESSAGE_LIMIT as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::super::workload::Idle;
    use super::*;
    use std::collections::BTreeMap;
    use std::net::Ipv4Addr;
    use std::sync::Arc;

    struct Exits(i32);

    impl Workload for Exits {
        fn tick(&mut self, _tick: &Tick) -> Progress {
            Progress {
                exit: Some(self.0),
                ..Progress::default()
            }
        }
    }

    impl super::super::workload::WorkloadFactory for Exits {
        fn start(&self, _context: WorkloadContext) -> Result<Box<dyn Workload>, String> {
            Ok(Box::new(Exits(self.0)))
        }
    }

    fn machine(factory: Arc<dyn super::super::workload::WorkloadFactory>) -> Machine {
        let spec = Container {
            name: "c".into(),
            ..Container::default()
        };
        Machine::new(spec, Some(Run::Workload(factory)))
    }

    fn context() -> Launch {
        Launch::Workload(WorkloadContext {
            namespace: "n".into(),
            pod: "p".into(),
            pod_uid: "u".into(),
            container: "c".into(),
            node: "node".into(),
            labels: BTreeMap::new(),
            args: Vec::new(),
            env: BTreeMap::new(),
            gpu_uuids: Vec::new(),
        })
    }

    #[test]
    fn a_loading_workload_is_running_but_not_ready() {
        let mut machine = machine(Arc::new(Idle {
            loading: Duration::from_secs(5),
        }));
        let now = Instant::now();
        assert!(machine.wants_start(now) && !machine.is_running());
        machine.start(context(), Ipv4Addr::LOCALHOST);
        machine.tick(now, PodView { ready: false });
        assert!(machine.is_running() && machine.has_started() && !machine.is_ready());
        machine.tick(now + Duration::from_secs(6), PodView { ready: false });
        assert!(machine.is_ready());
        machine.ask_to_end();
        machine.tick(now + Duration::from_secs(7), PodView { ready: true });
        assert_eq!(machine.exit_code(), Some(0));
    }

    #[test]
    fn restarts_follow_the_policy_and_back_off() {
        let mut machine = machine(Arc::new(Exits(3)));
        let now = Instant::now();
        machine.start(context(), Ipv4Addr::LOCALHOST);
        machine.tick(now, PodView { ready: false });
        assert_eq!(machine.exit_code(), Some(3));
        machine.restart("Never", now);
        assert_eq!(machine.exit_code(), Some(3));
        machine.restart("Always", now);
        assert!(!machine.wants_start(now) && machine.wants_start(now + FIRST_BACK_OFF));
        let status = machine.status();
        assert_eq!(status["restartCount"], 1);
        assert_eq!(status["state"]["waiting"]["reason"], "CrashLoopBackOff");
        assert_eq!(status["lastState"]["terminated"]["exitCode"], 3);
    }
}
