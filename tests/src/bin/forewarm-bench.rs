//! Measures the programs and prints their figures; see [`forewarm_tests::bench`].

use clap::Parser;

/// Measures release builds of the programs; prints one JSON object a figure.
#[derive(Debug, Parser)]
#[command(name = "forewarm-bench")]
struct Args {
    /// Parts (exporter, adapter) or figures (exporter_cpu, …) to measure; all when absent.
    #[arg(value_name = "PART")]
    parts: Vec<String>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    forewarm_tests::bench::run(&args.parts, &mut std::io::stdout()).await
}
