//! The half that needs no control plane: exporter and adapter on loopback, values read from the adapter's API.
//!
//! ```text
//! fake driver or the machine's ─► forewarm-exporter ─► forewarm-adapter --standalone ─► this demo
//! stand-in kubelet (which pod holds which GPU) ─┘
//! ```
//! Inputs: the built programs. Invariants: everything is up within seconds; every number shown comes from the
//! adapter's API; children die with [`Half`].

mod driver;
mod programs;
mod simulated;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use forewarm_fake_nvml::control::Control;
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use crate::demo::picture::{ActStatus, NodeRow, PodRow, Sample, Stage};
use crate::demo::reading::{self, Answer, mean, oldest};
use crate::kubelet::Kubelet;
use crate::load::OfferedLoad;
use crate::load::clock::LoadClock;
use crate::process::{Artefacts, Program, fetch};
use crate::scratch::Scratch;
use crate::wait::until;
use programs::{Running, adapter, exporter, gpus};
use simulated::Simulated;

/// What this half claims.
pub const CLAIMS: [&str; 2] = [
    "a GPU's reading becomes a pod's value in the metrics API",
    crate::demo::story::CLAIMS[0],
];

/// Namespace of the pods.
const NAMESPACE: &str = "demo";

/// GPUs of the simulated node, and pods: one each.
const GPUS: u32 = 2;

/// When the second replica's container starts, and how long it loads.
const SECOND: Duration = Duration::from_secs(4);
/// See [`SECOND`].
const LOADING: Duration = Duration::from_secs(8);

/// Time between two looks, and between two steps of the simulated replicas.
const PAUSE: Duration = Duration::from_millis(250);

/// Patience with a program that was just started.
const PATIENCE: Duration = Duration::from_secs(30);

/// A load that swings between a third of one GPU and nearly two, for as long as it is watched.
#[derive(Debug, Clone, Copy)]
pub struct Swing;

impl OfferedLoad for Swing {
    fn gpus(&self, since_start: Duration) -> f64 {
        0.35 + 0.75 * (1.0 - (since_start.as_secs_f64() * std::f64::consts::TAU / 24.0).cos())
    }

    fn length(&self) -> Duration {
        Duration::MAX
    }
}

/// Exporter and adapter, running.
pub struct Half {
    adapter: Program,
    api: SocketAddr,
    exporter: Running,
    kubelet: Kubelet,
    gpus: Vec<String>,
    _folder: Scratch,
}

impl std::fmt::Debug for Half {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Half")
            .field("api", &self.api)
            .finish_non_exhaustive()
    }
}

/// What was seen at the end.
#[derive(Debug, Clone, Copy, Default)]
pub struct Outcome {
    /// Most pods answered for at once.
    pub pods: usize,
    /// Age of the oldest value, the last time there was one.
    pub age: Option<f64>,
    /// Whether a replica that loads was left out; `None` with a real driver, where none loads.
    pub withheld: Option<bool>,
}

impl Half {
    /// Starts both programs.
    ///
    /// # Errors
    /// A program that does not start, or no driver where the real one was asked for.
    pub async fn start(stage: &Stage, artefacts: &Artefacts, real: bool) -> anyhow::Result<Self> {
        let folder = Scratch::new("demo")?;
        let kubelet_dir = folder.path().join("kubelet");
        std::fs::create_dir_all(&kubelet_dir)?;
        let kubelet = Kubelet::start(&kubelet_dir).context("the stand-in kubelet")?;
        let running = if real {
            let library = driver::library()?;
            stage.say(format!("starting forewarm-exporter on {}", library.display()));
            exporter(artefacts, &library, &kubelet_dir, folder.path(), None).await?
        } else {
            stage.say("starting forewarm-exporter on a stand-in for the driver's library");
            let control = folder.path().join("control.json");
            Control::default().write(&control)?;
            exporter(
                artefacts,
                &artefacts.fake_nvml,
                &kubelet_dir,
                folder.path(),
                Some(control),
            )
            .await?
        };
        let gpus = until("readings of a GPU", PATIENCE, || gpus(running.metrics))
            .await
            .map_err(|late| {
                if real {
                    anyhow::anyhow!("the driver's library is there, but no GPU answers: {late}")
                } else {
                    late.into()
                }
            })?;
        kubelet.set_allocatable(forewarm_signals::resource::GPU, gpus.clone());
        stage.say("starting forewarm-adapter --standalone");
        let (adapter, api) = adapter(artefacts, running.metrics, folder.path()).await?;
        Ok(Self {
            adapter,
            api,
            exporter: running,
            kubelet,
            gpus,
            _folder: folder,
        })
    }

    /// Plays until `until` says so, showing what the adapter's API answers.
    ///
    /// # Errors
    /// When the adapter ends.
    pub async fn play(
        &mut self,
        stage: &Stage,
        load: &LoadClock,
        stop: &CancellationToken,
        mut over: impl FnMut() -> bool,
    ) -> anyhow::Result<Outcome> {
        stage.update(|picture| {
            picture.nodes = vec![NodeRow {
                name: "this node".into(),
                exporter: "up",
                used: 0,
                gpus: self.gpus.len(),
            }];
        });
        let mut replicas: Vec<Simulated> = self
            .gpus
            .iter()
            .enumerate()
            .map(|(index, uuid)| Simulated::new(index, uuid))
            .collect();
        let real = self.exporter.control.is_none();
        let start = Instant::now();
        load.start(start);
        if real {
            stage.say("each GPU is shown as the pod that would hold it alone");
            replicas
                .iter_mut()
                .for_each(|replica| replica.begin(start, Duration::ZERO));
        } else {
            stage.say("one replica serves; a second one starts soon and loads its weights first");
        }
        let mut outcome = Outcome::default();
        while !over() && !stop.is_cancelled() {
            let now = Instant::now();
            if !real {
                self.step(&mut replicas, load, start, now)?;
            }
            for replica in &replicas {
                if let Some(pod) = replica.pod(now) {
                    self.kubelet.put(pod);
                }
            }
            let (sm_active, busy) = (
                self.ask("gpu_sm_active_percent").await,
                self.ask("gpu_busy_percent").await,
            );
            show(
                stage,
                &replicas,
                (!real).then(|| load.gpus(now)),
                now,
                &sm_active,
                &busy,
            );
            judge(stage, &mut outcome, &replicas, now, &sm_active, &busy);
            if let Some(status) = self.adapter.exited() {
                anyhow::bail!("forewarm-adapter ended: {status}\n{}", self.adapter.log());
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep(PAUSE) => {}
            }
        }
        Ok(outcome)
    }

    /// Moves the simulated replicas and writes their load into the fake's control file.
    fn step(
        &self,
        replicas: &mut [Simulated],
        load: &LoadClock,
        start: Instant,
        now: Instant,
    ) -> anyhow::Result<()> {
        for (replica, after) in replicas.iter_mut().zip([Duration::ZERO, SECOND]) {
            if now >= start + after {
                replica.begin(now, if after.is_zero() { Duration::ZERO } else { LOADING });
            }
        }
        let ready = u32::try_from(replicas.iter().filter(|replica| replica.is_ready(now)).count())
            .unwrap_or(1)
            .max(1);
        let share = load.gpus(now) / f64::from(ready);
        let mut control = Control::default();
        for (index, replica) in (0_u32..).zip(replicas.iter_mut()) {
            if let Some(activity) = replica.advance(now, share) {
                control.gpus.insert(index, simulated::gpu(&activity));
            }
        }
        if let Some(path) = &self.exporter.control {
            control.write(path).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }

    async fn ask(&self, metric: &str) -> Option<Answer> {
        let answer = fetch(self.api, &reading::path(NAMESPACE, "%2A", metric, ""))
            .await
            .ok()?;
        reading::read(answer.status.as_u16(), &answer.body, Timestamp::now()).ok()
    }
}

fn show(
    stage: &Stage,
    replicas: &[Simulated],
    offered: Option<f64>,
    now: Instant,
    sm_active: &Option<Answer>,
    busy: &Option<Answer>,
) {
    let values = |answer: &Option<Answer>| answer.clone().and_then(Result::ok).unwrap_or_default();
    let (sm_active, busy) = (values(sm_active), values(busy));
    let count = |ready: bool| {
        let these = replicas
            .iter()
            .filter(|replica| replica.has_begun() && replica.is_ready(now) == ready);
        u32::try_from(these.count()).unwrap_or(0)
    };
    // Not every GPU has GPM: on older ones utilisation is all there is.
    let read = if sm_active.is_empty() { &busy } else { &sm_active };
    stage.record(Sample {
        offered,
        busy: mean(&busy),
        sm_active: mean(&sm_active),
        age: oldest(read),
        queue: offered.map(|_| replicas.iter().map(Simulated::queue).sum()),
        ready: count(true),
        loading: count(false),
        answered: u32::try_from(read.len()).unwrap_or(0),
        ..Sample::default()
    });
    stage.update(|picture| {
        picture.pods = replicas
            .iter()
            .filter(|replica| replica.has_begun())
            .map(|replica| PodRow {
                name: replica.name.clone(),
                node: "this".into(),
                phase: if replica.is_ready(now) { "ready" } else { "loading" },
                busy: busy.get(&replica.name).map(|reading| reading.value),
                sm_active: sm_active.get(&replica.name).map(|reading| reading.value),
                age: read.get(&replica.name).map(|reading| reading.age),
            })
            .collect();
        let used = picture.pods.len();
        picture.nodes.iter_mut().for_each(|node| node.used = used);
    });
}

fn judge(
    stage: &Stage,
    outcome: &mut Outcome,
    replicas: &[Simulated],
    now: Instant,
    sm_active: &Option<Answer>,
    busy: &Option<Answer>,
) {
    let Some(values) = [sm_active, busy]
        .into_iter()
        .flatten()
        .find_map(|answer| answer.as_ref().ok())
    else {
        return;
    };
    if outcome.pods == 0 && !values.is_empty() {
        stage.act(0, ActStatus::Shown, format!("{} pods answered for", values.len()));
        stage.say("the first value is there");
    }
    if values.len() > outcome.pods && outcome.pods > 0 {
        stage.say(format!("{} pods are ready and answered for", values.len()));
    }
    outcome.pods = outcome.pods.max(values.len());
    outcome.age = oldest(values).or(outcome.age);
    for replica in replicas
        .iter()
        .filter(|replica| replica.has_begun() && !replica.is_ready(now))
    {
        let listed = values.contains_key(&replica.name);
        if outcome.withheld != Some(false) && outcome.withheld != Some(!listed) {
            let (status, word) = if listed {
                (ActStatus::Refuted, "in")
            } else {
                (ActStatus::Shown, "not in")
            };
            stage.act(
                1,
                status,
                format!("{} loads its weights and is {word} the answer", replica.name),
            );
            stage.say(format!(
                "{} loads its weights and is {word} the answer",
                replica.name
            ));
        }
        outcome.withheld = Some(outcome.withheld.unwrap_or(true) && !listed);
    }
}
