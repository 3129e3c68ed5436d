//! The command lines of our programs, as they define them.
//!
//! Inputs: none. Invariants: nothing is parsed and nothing of the environment read.

use clap::{Command, CommandFactory as _};

/// `forewarm-exporter`.
pub(crate) fn exporter() -> Command {
    forewarm_exporter::args::Args::command()
}

/// `forewarm-adapter`.
pub(crate) fn adapter() -> Command {
    forewarm_adapter::args::Args::command()
}
