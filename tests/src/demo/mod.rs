//! The demo: a GPU's load becomes replicas, live, and the demo judges itself by what API and HPA say.
//!
//! ```text
//!  load/ ─► simulated replicas ─► fake driver ─► exporter ─► adapter ─► kube-apiserver ─► HPA ─► replicas
//!                                                                           │
//!              terminal.rs, page.rs ◄─ picture.rs ◄─ observe.rs ◄───────────┤
//!              last line            ◄─ judge.rs   ◄─ story.rs   ◄───────────┘
//! ```
//! Inputs: [`args`]. Invariants: nothing outlives the process ([`crate::contain`]); the page's listener is the
//! only thing reachable from outside, on loopback; the last line on stdout is JSON; the exit code says
//! whether everything was as claimed.

pub mod args;
pub mod cluster;
pub mod judge;
pub mod objects;
pub mod observe;
pub mod page;
pub mod picture;
pub mod reading;
pub mod standalone;
pub mod story;
pub mod terminal;
pub mod view;
mod whole;
pub mod wishes;

use std::future::Future;
use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::contain::{self, Role};
use crate::controlplane::binaries::Binaries;
use crate::load::clock::LoadClock;
use crate::netns;
use crate::process::{Artefacts, artefacts};
use crate::simnode::launcher;
use args::{Args, Request};
use picture::{ActStatus, Picture, Stage};

/// Exit code of a usage error.
const USAGE: u8 = 64;

/// Exit code after Ctrl-C.
const INTERRUPTED: u8 = 130;

/// The whole program.
#[must_use]
pub fn main() -> ExitCode {
    // A re-execution as a simulated container has other arguments than ours.
    if let Some(code) = launcher::run_if_asked() {
        return code;
    }
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(answer) => {
            // Help and version are answers too, and no errors.
            let _ = answer.print();
            return if answer.use_stderr() {
                ExitCode::from(USAGE)
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    let request = match args.resolve() {
        Ok(request) => request,
        Err(problems) => {
            tell_error(&problems);
            return ExitCode::from(USAGE);
        }
    };
    match contain::enter() {
        Ok(Role::Outer(code)) => return code,
        Ok(Role::Inner) => {}
        // The half without a cluster needs no namespaces: its children end with their guards.
        Err(_) if request.standalone => {}
        Err(error) => {
            tell_error(&format!(
                "{error}\nCONTROL_PLANE=none shows exporter and adapter without them"
            ));
            return ExitCode::FAILURE;
        }
    }
    match contained(&request) {
        Ok(code) => code,
        Err(error) => {
            tell_error(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

#[allow(clippy::print_stderr, reason = "the program's own last words")]
fn tell_error(text: &str) {
    eprintln!("forewarm-demo: {text}");
}

fn contained(request: &Request) -> anyhow::Result<ExitCode> {
    let loopback = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    // Bound out here, so that a browser and kubectl of this machine reach what runs in there.
    let page = loopback(request.page_port).with_context(|| format!("--page-port {}", request.page_port))?;
    let api = request.hold.then(|| loopback(0)).transpose()?;
    let artefacts = &programs()?;
    if !request.standalone {
        Binaries::find()?;
        netns::enter()?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let code = runtime.block_on(show(request, artefacts, page, api));
    runtime.shutdown_timeout(Duration::from_secs(1));
    code
}

/// The programs beside this one, which `cargo xtask demo` has just built; else built now.
fn programs() -> anyhow::Result<Artefacts> {
    let beside = std::env::current_exe()?;
    let here = |name: &str| beside.with_file_name(name);
    let found = Artefacts {
        exporter: here("forewarm-exporter"),
        adapter: here("forewarm-adapter"),
        fake_nvml: here("libforewarm_fake_nvml.so"),
    };
    let complete = [&found.exporter, &found.adapter, &found.fake_nvml]
        .into_iter()
        .all(|path| path.is_file());
    Ok(if complete { found } else { artefacts()?.clone() })
}

/// What the body of a run came to.
struct Ending {
    /// The last line, where there is one.
    line: Option<String>,
    /// Whether everything was as claimed.
    good: bool,
}

async fn show(
    request: &Request,
    artefacts: &Artefacts,
    page: TcpListener,
    api: Option<TcpListener>,
) -> anyhow::Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let stage = Arc::new(Stage::new(first_picture(request, &page)?));
    let drawing = CancellationToken::new();
    let mut drawers = JoinSet::new();
    drawers.spawn(page::serve(page, Arc::clone(&stage), drawing.clone()));
    drawers.spawn(terminal::show(Arc::clone(&stage), drawing.clone()));

    let stop = CancellationToken::new();
    let body = async {
        if request.standalone {
            Box::pin(standalone_half(request, artefacts, &stage, &stop)).await
        } else {
            Box::pin(whole::tell(request, artefacts, &stage, api, &stop)).await
        }
    };
    let (ending, interrupted) = until_interrupted(body, &stop, async {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
    .await;

    drawing.cancel();
    while let Some(drawn) = drawers.join_next().await {
        // A page or terminal that went away is no failure of the loop.
        drop(drawn);
    }
    let ending = match (ending, interrupted) {
        (Some(Ok(ending)), _) => ending,
        (Some(Err(error)), false) => return Err(error),
        // What was interrupted says so by its exit code.
        (None, _) | (Some(Err(_)), true) => return Ok(ExitCode::from(INTERRUPTED)),
    };
    finish(&stage.picture(), &ending)?;
    Ok(match (interrupted && !request.hold, ending.good) {
        (true, _) => ExitCode::from(INTERRUPTED),
        (false, true) => ExitCode::SUCCESS,
        (false, false) => ExitCode::FAILURE,
    })
}

/// Runs `body`; at an interrupt asks it to stop and gives it a little time.
async fn until_interrupted<T>(
    body: impl Future<Output = T>,
    stop: &CancellationToken,
    interrupt: impl Future<Output = ()>,
) -> (Option<T>, bool) {
    let mut body = std::pin::pin!(body);
    tokio::select! {
        ended = &mut body => return (Some(ended), false),
        () = interrupt => {}
    }
    stop.cancel();
    (
        tokio::time::timeout(Duration::from_secs(3), body).await.ok(),
        true,
    )
}

fn first_picture(request: &Request, page: &TcpListener) -> anyhow::Result<Picture> {
    let what = match (request.standalone, request.real_nvml) {
        (true, true) => "exporter and adapter on this machine's driver".to_owned(),
        (true, false) => "exporter and adapter on a simulated driver, no control plane".to_owned(),
        (false, _) => format!(
            "real kube-apiserver, scheduler and HPA controller (sync every {} s); {} simulated nodes with {} H100 each",
            whole::HPA_SYNC.as_secs(),
            cluster::NODES,
            cluster::GPUS
        ),
    };
    let claims = if request.standalone {
        &standalone::CLAIMS[..]
    } else {
        &story::CLAIMS[..]
    };
    // With a real driver nothing is simulated that could load.
    let claims = if request.real_nvml { &claims[..1] } else { claims };
    let mut picture = Picture::new(&what, claims);
    picture.target = (!request.standalone).then_some(f64::from(whole::AIM));
    let load = match (request.standalone, request.real_nvml) {
        (true, true) => "this machine's own",
        (true, false) => "swings between a third of a GPU and nearly two",
        (false, _) => &request.load_name,
    };
    picture.links = vec![
        format!("page  http://{}", page.local_addr()?),
        format!("load  {load}"),
    ];
    Ok(picture)
}

async fn standalone_half(
    request: &Request,
    artefacts: &Artefacts,
    stage: &Stage,
    stop: &CancellationToken,
) -> anyhow::Result<Ending> {
    let began = std::time::Instant::now();
    let mut half = standalone::Half::start(stage, artefacts, request.real_nvml).await?;
    let load = LoadClock::new(Arc::new(standalone::Swing));
    if request.while_building {
        stage.say("the control plane is being built; the whole loop follows");
        half.play(stage, &load, stop, || Binaries::find().is_ok()).await?;
        return Ok(Ending {
            line: None,
            good: true,
        });
    }
    let outcome = half
        .play(stage, &load, stop, || {
            !request.hold && began.elapsed() >= request.standalone_for
        })
        .await?;
    let withheld = match outcome.withheld {
        Some(true) => "withheld",
        Some(false) => "counted",
        None => "not shown",
    };
    let line = serde_json::json!({"demo": {
        "control_plane": "none",
        "pods": outcome.pods,
        "value_age_s": outcome.age.map(|age| (age * 10.0).round() / 10.0),
        "loading_replica": withheld,
    }});
    let good = outcome.pods > 0 && (request.real_nvml || outcome.withheld == Some(true));
    Ok(Ending {
        line: Some(line.to_string()),
        good,
    })
}

/// What stays on the screen: the acts with their evidence, then the last line.
fn finish(picture: &Picture, ending: &Ending) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    for act in &picture.acts {
        let mark = match act.status {
            ActStatus::Shown => "shown    ",
            ActStatus::Refuted => "NOT shown",
            ActStatus::Running | ActStatus::Waiting => "not begun",
        };
        writeln!(out, "{mark} {}", act.claim)?;
        if !act.evidence.is_empty() {
            writeln!(out, "          {}", act.evidence)?;
        }
    }
    if let Some(line) = &ending.line {
        writeln!(out, "{line}")?;
    }
    out.flush()
}
