//! Cost of reading one line of exposition, and its ratio to merely finding the line feeds.
//!
//! The body has the shape of the exporter's: 8 GPUs with 80 device lines each and 8 pods with 12 lines each.
#![allow(missing_docs, reason = "criterion's macros generate undocumented functions")]

use std::fmt::Write as _;
use std::hint::black_box;
use std::io::Write as _;
use std::time::Instant;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use forewarm_adapter::exposition::{Exposition as _, PrometheusText};

fn body() -> String {
    let mut body = String::new();
    for family in 0..40 {
        let _ = writeln!(
            body,
            "# HELP gpu_family_{family} Some help text of the usual length"
        );
        let _ = writeln!(body, "# TYPE gpu_family_{family} gauge");
        for gpu in 0..8 {
            for direction in ["rx", "tx"] {
                let value = f64::from(family * 8 + gpu) * 0.123_456_7;
                let _ = writeln!(
                    body,
                    "gpu_family_{family}{{gpu=\"{gpu}\",uuid=\"GPU-8c2b6a4e-5f0d-4b3a-9e71-0000000000{gpu:02}\",direction=\"{direction}\"}} {value}"
                );
            }
        }
    }
    for family in 0..12 {
        let _ = writeln!(body, "# TYPE gpu_pod_family_{family} gauge");
        for gpu in 0..8 {
            let _ = writeln!(
                body,
                "gpu_pod_family_{family}{{namespace=\"serving\",pod=\"llm-7f9c5d8b6-x{gpu}k2p\",container=\"server\",pod_uid=\"3f2b1c6e-9a4d-4c8e-b7a1-00000000000{gpu}\",gpu=\"{gpu}\",uuid=\"GPU-8c2b6a4e-5f0d-4b3a-9e71-0000000000{gpu:02}\",source=\"exclusive\"}} 0.{gpu}37"
            );
        }
    }
    body
}

fn parse(body: &str) -> f64 {
    let mut sum = 0.0;
    let parsed = PrometheusText.parse(body.as_bytes(), &mut |sample| sum += sample.value);
    assert!(parsed.is_ok());
    sum
}

fn scan(body: &str) -> usize {
    memchr::memchr_iter(b'\n', body.as_bytes()).count()
}

fn exposition(criterion: &mut Criterion) {
    let body = body();
    let lines = scan(&body);
    let mut group = criterion.benchmark_group("exposition");
    group.throughput(Throughput::Elements(lines as u64));
    group.bench_function("parse", |b| b.iter(|| parse(black_box(&body))));
    group.bench_function("line_scan", |b| b.iter(|| scan(black_box(&body))));
    group.finish();

    let nanos_a_line = |run: &dyn Fn()| {
        let rounds = 200_u32;
        let start = Instant::now();
        for _ in 0..rounds {
            run();
        }
        start.elapsed().as_secs_f64() * 1e9 / f64::from(rounds) / lines as f64
    };
    let parse_ns = nanos_a_line(&|| {
        black_box(parse(black_box(&body)));
    });
    let scan_ns = nanos_a_line(&|| {
        black_box(scan(black_box(&body)));
    });
    let _no_reader = writeln!(
        std::io::stderr(),
        "{lines} lines, {} bytes: {parse_ns:.0} ns a line, {scan_ns:.1} ns for the line scan alone, ratio {:.0}",
        body.len(),
        parse_ns / scan_ns
    );
}

criterion_group!(benches, exposition);
criterion_main!(benches);
