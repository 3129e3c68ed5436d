//! `once`: reads everything, prints it, ends.
//!
//! Invariants: uses the same threads, snapshots and renderer as serving; a GPU that does not answer is shown as down
//! after a deadline instead of being waited for.

use std::io::Write as _;
use std::time::{Duration, Instant};

use forewarm_runtime::exit::Failure;
use forewarm_runtime::status::Status;
use forewarm_runtime::tasks::Tasks;
use forewarm_signals::Family;
use prometheus_client::registry::Registry;
use serde_json::{Map, Value, json};

use crate::args::{Config, Output};
use crate::attribution;
use crate::poll::{self, Supervision};
use crate::render::page::{Page, Selection};
use crate::render::text::Format;
use crate::run::{Parts, attribution_config};
use crate::snapshot::{FleetState, LibraryState, Presence};

/// How long to wait for GPUs and sockets beyond the two readings.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long attribution's tasks may take to end: they wait for sockets only.
const DRAIN: Duration = Duration::from_secs(1);
/// How often to look whether all is there.
const LOOK: Duration = Duration::from_millis(20);
/// Ticks after which rates and GPM have their two samples.
const TICKS: u64 = 2;

/// The driver did not open.
#[derive(Debug, thiserror::Error)]
#[error("no driver: {0}")]
struct NoDriver(String);

pub(crate) async fn run(config: Config, output: Output) -> Result<(), Failure> {
    let tasks = Tasks::new();
    let outcome = print(config, output, &tasks).await;
    // Told to stop before the runtime goes, so that their end is no surprise to anybody.
    tasks.token().cancel();
    tasks.run_until_stopped(DRAIN).await;
    outcome
}

async fn print(config: Config, output: Output, tasks: &Tasks) -> Result<(), Failure> {
    let status = Status::new();
    let parts = Parts::new(config.interval);
    let view = attribution::start(attribution_config(&config), tasks, &mut Registry::default());
    let supervision = Supervision {
        fleet: std::sync::Arc::clone(&parts.fleet),
        counts: std::sync::Arc::clone(&parts.counts),
        heartbeat: status.liveness.heartbeat("supervisor", PATIENCE),
        driver: status.readiness.condition("driver"),
        lost_access: status.liveness.fault("device-access"),
    };
    poll::start(parts.opener(config.nvml_library.clone()), supervision)?;

    let deadline = Instant::now() + PATIENCE + 2 * config.interval;
    while !(status.readiness.is_ready() && is_complete(&parts.fleet.load())) && Instant::now() < deadline {
        tokio::time::sleep(LOOK).await;
    }
    if let LibraryState::Waiting(reason) = &parts.fleet.load().library {
        return Err(NoDriver(reason.clone()).into());
    }
    if config.kubelet_dir.join("pod-resources").is_dir() {
        view.settled(PATIENCE).await;
    }
    let now = Instant::now();
    let (page, _) = parts.renderer(view).page(now);
    let body = match output {
        Output::Text => page.body(Format::Text, Selection::All, now),
        Output::Json => json(&page, now)?.into_bytes(),
    };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&body)?;
    stdout.flush()?;
    Ok(())
}

/// Whether nothing more is to be waited for: no driver, or each GPU read twice or known to be gone.
fn is_complete(state: &FleetState) -> bool {
    match state.library {
        LibraryState::Waiting(_) => true,
        LibraryState::Open { .. } => state.devices.iter().all(|slot| {
            let snapshot = slot.load();
            snapshot.ticks >= TICKS || snapshot.presence == Presence::Lost
        }),
    }
}

/// The page as JSON: families with their samples. Numbers that JSON cannot hold exactly stay as they were written.
fn json(page: &Page, now: Instant) -> Result<String, Failure> {
    let text = page.body(Format::Text, Selection::All, now);
    let text = String::from_utf8(text)?;
    let mut families: Vec<(&str, Vec<Value>)> = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some((name, labels, value)) = sample(line) else {
            continue;
        };
        let value = serde_json::from_str(value)?;
        let sample = json!({ "labels": Value::Object(labels), "value": Value::Number(value) });
        match families.last_mut().filter(|(last, _)| *last == name) {
            Some((_, samples)) => samples.push(sample),
            None => families.push((name, vec![sample])),
        }
    }
    let families: Vec<Value> = families
        .into_iter()
        .map(|(name, samples)| family(name, &samples))
        .collect();
    let mut out = serde_json::to_string_pretty(&json!({ "families": families }))?;
    out.push('\n');
    Ok(out)
}

fn family(name: &str, samples: &[Value]) -> Value {
    let known: Option<&'static Family> = forewarm_signals::by_name(name);
    json!({
        "name": name,
        "type": known.map(|family| family.kind.openmetrics_type()),
        "unit": known.and_then(|family| family.unit).map(forewarm_signals::Unit::suffix),
        "help": known.map(|family| family.help),
        "samples": samples,
    })
}

/// Takes a line of our own text format apart.
fn sample(line: &str) -> Option<(&str, Map<String, Value>, &str)> {
    let name_end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(name_end);
    let mut labels = Map::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            let (key, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.insert(key.to_owned(), Value::String(value));
            match after.strip_prefix(',') {
                Some(next) => rest = next,
                None => {
                    rest = after.strip_prefix('}')?;
                    break;
                }
            }
        }
    }
    Some((name, labels, rest.strip_prefix(' ')?))
}

/// The unescaped text up to the closing quote, and what follows it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, text.get(at + 1..)?)),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_taken_apart_with_its_escapes() {
        let (name, labels, value) = sample(r#"gpu_x{a="p,q\"}",b="c\nd\\"} 1.5"#).unwrap();
        assert_eq!((name, value), ("gpu_x", "1.5"));
        assert_eq!(labels["a"], "p,q\"}");
        assert_eq!(labels["b"], "c\nd\\");
        assert_eq!(sample("gpu_y 3").unwrap().2, "3");
        assert!(sample("gpu_y{a=\"b} 3").is_none());
    }
}
