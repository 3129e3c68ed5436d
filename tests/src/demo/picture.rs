//! What the demo shows at a moment: one value that terminal and page both draw.
//!
//! Inputs: samples, rows and events from the observers and the story. Invariants: plain data without I/O;
//! numbers read from the API are `None` when the API had none, never 0; history and events are bounded.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;

/// Samples kept for plots: an hour at two a second.
const HISTORY: usize = 7200;

/// Events kept.
const EVENTS: usize = 200;

/// The whole picture.
#[derive(Debug, Clone, Serialize)]
pub struct Picture {
    /// One line that says what is real here and what is simulated.
    pub subtitle: String,
    /// Seconds since the demo began.
    pub elapsed: f64,
    /// What is happening now, in a sentence.
    pub now: String,
    /// What the HPA aims at, percent; absent where there is no HPA.
    pub target: Option<f64>,
    /// Time series, oldest first.
    pub history: VecDeque<Sample>,
    /// Pods of the workload, by name.
    pub pods: Vec<PodRow>,
    /// GPU nodes.
    pub nodes: Vec<NodeRow>,
    /// What the demo undertakes to show.
    pub acts: Vec<Act>,
    /// What happened, oldest first.
    pub events: VecDeque<Event>,
    /// Lines for the foot: addresses.
    pub links: Vec<String>,
}

/// One moment in the plots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Sample {
    /// Seconds since the demo began.
    pub at: f64,
    /// Offered load, GPUs.
    pub offered: Option<f64>,
    /// Mean of `gpu_busy_percent` over the pods that the metrics API answered for.
    pub busy: Option<f64>,
    /// Mean of `gpu_sm_active_percent` likewise.
    pub sm_active: Option<f64>,
    /// Age of the oldest value in that answer, seconds.
    pub age: Option<f64>,
    /// Requests waiting in all replicas (the workload's own count).
    pub queue: Option<f64>,
    /// `status.currentReplicas` of the HPA.
    pub current: Option<i32>,
    /// `status.desiredReplicas` of the HPA.
    pub desired: Option<i32>,
    /// Pods that are Ready.
    pub ready: u32,
    /// Pods that run and are not Ready.
    pub loading: u32,
    /// Pods the metrics API answered for.
    pub answered: u32,
}

/// A pod of the workload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PodRow {
    /// Name of the pod.
    pub name: String,
    /// Node it is bound to.
    pub node: String,
    /// `pending`, `loading`, `ready` or `ending`.
    pub phase: &'static str,
    /// Its `gpu_busy_percent`, if the API has one.
    pub busy: Option<f64>,
    /// Its `gpu_sm_active_percent`, if the API has one.
    pub sm_active: Option<f64>,
    /// Age of the latter, seconds.
    pub age: Option<f64>,
}

/// A GPU node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodeRow {
    /// Name of the node.
    pub name: String,
    /// `up`, `starting` or `stopped`.
    pub exporter: &'static str,
    /// GPUs held by pods of the workload.
    pub used: usize,
    /// GPUs it has.
    pub gpus: usize,
}

/// Something the demo undertakes to show.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Act {
    /// What, in a sentence.
    pub claim: &'static str,
    /// How far it is.
    pub status: ActStatus,
    /// The evidence, once there is some.
    pub evidence: String,
}

/// How far an act is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ActStatus {
    /// Not begun.
    Waiting,
    /// Under way.
    Running,
    /// Seen as claimed.
    Shown,
    /// Seen otherwise.
    Refuted,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Event {
    /// Seconds since the demo began.
    pub at: f64,
    /// What.
    pub text: String,
}

impl Picture {
    /// An empty picture.
    #[must_use]
    pub fn new(subtitle: &str, acts: &[&'static str]) -> Self {
        Self {
            subtitle: subtitle.to_owned(),
            elapsed: 0.0,
            now: "starting".to_owned(),
            target: None,
            history: VecDeque::new(),
            pods: Vec::new(),
            nodes: Vec::new(),
            acts: acts
                .iter()
                .map(|claim| Act {
                    claim,
                    status: ActStatus::Waiting,
                    evidence: String::new(),
                })
                .collect(),
            events: VecDeque::new(),
            links: Vec::new(),
        }
    }

    /// The newest sample.
    #[must_use]
    pub fn last(&self) -> Sample {
        self.history.back().copied().unwrap_or_default()
    }
}

/// The picture, shared between those who fill it and those who draw it.
#[derive(Debug)]
pub struct Stage {
    began: Instant,
    picture: Mutex<Picture>,
}

impl Stage {
    /// A stage with an empty picture.
    #[must_use]
    pub fn new(picture: Picture) -> Self {
        Self {
            began: Instant::now(),
            picture: Mutex::new(picture),
        }
    }

    /// A copy for drawing.
    #[must_use]
    pub fn picture(&self) -> Picture {
        let mut picture = self.lock().clone();
        picture.elapsed = self.elapsed();
        picture
    }

    /// Seconds since the demo began.
    #[must_use]
    pub fn elapsed(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Says what is happening now, and keeps it among the events.
    pub fn say(&self, text: impl Into<String>) {
        let text = text.into();
        self.lock().now.clone_from(&text);
        self.note(text);
    }

    /// Keeps something that happened among the events.
    pub fn note(&self, text: impl Into<String>) {
        let text = text.into();
        let at = self.elapsed();
        let mut picture = self.lock();
        if picture.events.len() == EVENTS {
            picture.events.pop_front();
        }
        picture.events.push_back(Event { at, text });
    }

    /// Says what is happening now without an event: for progress that changes every second.
    pub fn progress(&self, text: impl Into<String>) {
        self.lock().now = text.into();
    }

    /// Adds a moment to the plots.
    pub fn record(&self, mut sample: Sample) {
        sample.at = self.elapsed();
        let mut picture = self.lock();
        if picture.history.len() == HISTORY {
            picture.history.pop_front();
        }
        picture.history.push_back(sample);
    }

    /// Changes anything else.
    pub fn update(&self, change: impl FnOnce(&mut Picture)) {
        change(&mut self.lock());
    }

    /// Notes how far an act is.
    pub fn act(&self, index: usize, status: ActStatus, evidence: impl Into<String>) {
        if let Some(act) = self.lock().acts.get_mut(index) {
            act.status = status;
            act.evidence = evidence.into();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Picture> {
        // A picture half updated by a panic is still a picture.
        self.picture.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_and_events_are_bounded() {
        let stage = Stage::new(Picture::new("test", &["a"]));
        for number in 0..HISTORY + 10 {
            stage.record(Sample {
                ready: u32::try_from(number).unwrap(),
                ..Sample::default()
            });
        }
        for number in 0..EVENTS + 10 {
            stage.say(format!("event {number}"));
        }
        let picture = stage.picture();
        assert_eq!((picture.history.len(), picture.events.len()), (HISTORY, EVENTS));
        assert_eq!(picture.last().ready, u32::try_from(HISTORY + 9).unwrap());
        assert_eq!(picture.now, format!("event {}", EVENTS + 9));
    }

    #[test]
    fn what_the_api_did_not_answer_stays_absent_on_the_page() {
        let stage = Stage::new(Picture::new("test", &["a"]));
        stage.record(Sample::default());
        stage.act(0, ActStatus::Refuted, "seen otherwise");
        let json = serde_json::to_value(stage.picture()).unwrap();
        assert!(json["history"][0]["sm_active"].is_null());
        assert_eq!(json["acts"][0]["status"], "refuted");
    }
}
