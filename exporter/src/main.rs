//! Entry point of `forewarm-exporter`: installs the crypto provider and calls the library.

use std::process::ExitCode;

use forewarm_runtime::exit;

fn main() -> ExitCode {
    forewarm_runtime::install_crypto();
    exit::finish(forewarm_exporter::run(exit::parse()))
}
