//! What the README shows is what the library reads.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, outside #[test] functions"
)]

use forewarm_fake_nvml::control::{Control, Effect, Fault, Process};
use forewarm_fake_nvml::profile::BUILT_IN;

const README: &str = include_str!("../README.md");

/// The JSON blocks, in order.
fn blocks() -> Vec<&'static str> {
    README
        .split("```json\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap())
        .collect()
}

/// First cells of the table whose head begins with `head`, without their code marks.
fn first_cells(head: &str) -> Vec<&'static str> {
    README
        .lines()
        .skip_while(|line| !line.starts_with(head))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.split('|').nth(1).unwrap().trim().trim_matches('`'))
        .collect()
}

#[test]
fn every_example_is_read_and_sets_something() {
    let blocks = blocks();
    let [control, process, mig, faults] = blocks.as_slice() else {
        panic!("{} blocks", blocks.len());
    };
    for text in [control, mig] {
        let read: Control = serde_json::from_str(text).unwrap();
        assert!(!read.gpus.is_empty());
    }
    let read: Process = serde_json::from_str(process).unwrap();
    assert_eq!(read.lag_ms, Some(8_000));
    let read: Vec<Fault> = serde_json::from_str(&format!("[{faults}]")).unwrap();
    assert_eq!(read[0].after_calls, Some(2));
    assert_eq!(read[1].ids, [138, 139]);
}

#[test]
fn every_effect_and_every_profile_is_listed() {
    let effects = first_cells("| `effect`");
    assert!(effects.len() > 8, "{effects:?}");
    for text in effects {
        serde_json::from_str::<Effect>(text).unwrap_or_else(|cause| panic!("{text}: {cause}"));
    }
    let mut listed = first_cells("| profile |");
    let mut built_in = BUILT_IN.to_vec();
    listed.sort_unstable();
    built_in.sort_unstable();
    assert_eq!(listed, built_in);
}
