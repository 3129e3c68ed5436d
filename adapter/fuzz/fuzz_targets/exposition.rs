//! The exposition readers never panic, never read past the body, and agree with themselves on a second read.
#![no_main]

use forewarm_adapter::exposition::{Exposition, OpenMetrics, PrometheusText};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| {
    for format in [&PrometheusText as &dyn Exposition, &OpenMetrics] {
        let mut samples = 0;
        let first = format.parse(body, &mut |sample| {
            assert!(!sample.name.is_empty());
            samples += 1;
        });
        if let Ok(parsed) = &first {
            assert_eq!(parsed.samples, samples);
        }
        assert_eq!(first, format.parse(body, &mut |_| {}));
    }
});
