//! Process level: the demo's standalone half and its refusals, as a newcomer meets them.
//!
//! Inputs: the built demo, exporter, adapter and fake driver. The whole loop is the apiserver level's and `make demo`'s.

use std::process::{Command, Output, Stdio};

use forewarm_tests::process::artefacts;

/// The demo with nothing of the caller's settings.
fn demo() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forewarm-demo"));
    command
        .stdin(Stdio::null())
        .env_remove("CONTROL_PLANE")
        .env_remove("NVML")
        .env("NO_COLOR", "1");
    command
}

fn text(output: &Output) -> (String, String) {
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

#[test]
fn without_a_control_plane_it_shows_values_and_withholds_a_loading_replica() {
    // The demo runs the programs beside it: they must be of the present sources.
    artefacts().unwrap();
    let output = demo()
        .env("CONTROL_PLANE", "none")
        .args(["--duration", "16"])
        .output()
        .unwrap();
    let (out, err) = text(&output);
    assert!(output.status.success(), "{out}\n{err}");
    let last: serde_json::Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    assert_eq!(last["demo"]["control_plane"], "none");
    assert_eq!(last["demo"]["pods"], 2, "{out}");
    assert_eq!(last["demo"]["loading_replica"], "withheld", "{out}");
    // Scraped each second, and told in whole seconds.
    let age = last["demo"]["value_age_s"].as_f64().unwrap();
    assert!(age < 5.0, "{age} s, {out}");
    assert!(
        !out.contains('\u{1b}'),
        "no escape sequences where stdout is not a terminal: {out}"
    );
}

#[test]
fn bad_settings_are_reported_together_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("load.csv");
    std::fs::write(&trace, "time_s,busy\n0,5\n57,many\n").unwrap();
    let output = demo()
        .arg("--trace")
        .arg(&trace)
        .args(["--time", "time_s", "--column", "busy", "--peak", "99"])
        .output()
        .unwrap();
    let (out, err) = text(&output);
    assert_eq!(output.status.code(), Some(64), "{err}");
    for part in ["load.csv:3", "column `busy`", "`many`", "--peak 99"] {
        assert!(err.contains(part), "no {part:?} in {err}");
    }
    assert!(out.is_empty(), "{out}");
    assert_eq!(
        demo().args(["--speed", "3"]).output().unwrap().status.code(),
        Some(64),
        "needs a trace"
    );
}

#[test]
fn a_real_driver_that_is_not_there_is_named() {
    artefacts().unwrap();
    let output = demo()
        .env("NVML", "real")
        .args(["--duration", "1"])
        .output()
        .unwrap();
    let (out, err) = text(&output);
    if output.status.success() {
        // A machine with GPUs: then it must have shown them.
        assert!(out.lines().last().unwrap().starts_with("{\"demo\":"), "{out}");
        return;
    }
    assert!(
        err.contains("NVML=real") && err.contains("libnvidia-ml.so.1") || err.contains("no GPU answers"),
        "{err}"
    );
}
