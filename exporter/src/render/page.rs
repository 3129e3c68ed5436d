//! One tick's text: family by family, with the age lines left open until a response is written.
//!
//! Invariants: everything but ages is the same for every response of a page; ages are those of the moment of the
//! response; a selection keeps the age lines that its families need; a gzip body is one valid member whose larger
//! part was compressed once.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use flate2::{Compress, Compression, Crc, FlushCompress};
use forewarm_signals::{Family, Group, MeasuredAt, gpu, pod};

use super::text::{self, Format};

/// Different answers kept ready: two formats for the whole page and for the selections of a few readers.
const KEPT: usize = 8;

/// Which families a response holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selection {
    /// All.
    All,
    /// Those whose bit is set, by place on the page.
    Some(u128),
}

/// A family's samples.
#[derive(Debug)]
pub struct Section {
    /// Which family.
    pub family: &'static Family,
    /// Its sample lines.
    pub samples: Vec<u8>,
}

/// An age line but for its number.
#[derive(Debug)]
pub struct AgeLine {
    /// `name{labels} ` with the space.
    pub prefix: Vec<u8>,
    /// Whose age it is, for selections; `None` for pods.
    pub group: Option<Group>,
    /// When the reading was taken.
    pub at: Instant,
}

/// One tick's text.
#[derive(Debug, Default)]
pub struct Page {
    /// Families in the order they are written.
    pub sections: Vec<Section>,
    /// Age lines of devices and pods.
    pub ages: Vec<AgeLine>,
    ready: Mutex<Vec<Ready>>,
}

/// A static part that was composed before.
#[derive(Debug, Clone)]
struct Ready {
    format: Format,
    selection: Selection,
    plain: Arc<Vec<u8>>,
    deflated: Option<Arc<Deflated>>,
}

#[derive(Debug)]
struct Deflated {
    bytes: Vec<u8>,
    crc: Crc,
}

/// Compresses; kept because its state is large.
#[derive(Debug)]
pub struct Deflater(Compress);

impl Default for Deflater {
    fn default() -> Self {
        // Level 1: scrapes are many and sizes small.
        Self(Compress::new(Compression::fast(), false))
    }
}

impl Deflater {
    /// Raw deflate of `input`; `end` closes the stream, else it ends at a byte boundary to be continued.
    fn run(&mut self, input: &[u8], end: bool) -> Vec<u8> {
        self.0.reset();
        let mut out = Vec::with_capacity(input.len() / 4 + 64);
        let flush = if end {
            FlushCompress::Finish
        } else {
            FlushCompress::Sync
        };
        loop {
            let taken = usize::try_from(self.0.total_in())
                .unwrap_or(usize::MAX)
                .min(input.len());
            let before = out.len();
            let status = self
                .0
                .compress_vec(input.get(taken..).unwrap_or_default(), &mut out, flush);
            let is_done = match status {
                Ok(flate2::Status::StreamEnd) => true,
                // With a sync flush, room left over means that everything was written.
                Ok(_) => !end && out.len() < out.capacity(),
                Err(_) => true,
            };
            if is_done || (out.len() == before && out.len() < out.capacity()) {
                return out;
            }
            out.reserve(out.capacity().max(1024));
        }
    }
}

impl Page {
    /// The selection of the families with these names. Unknown names select nothing.
    pub fn select<'a>(families: &[&'static Family], names: impl Iterator<Item = &'a str>) -> Selection {
        let mut mask = 0;
        let mut is_any = false;
        for name in names {
            is_any = true;
            for (at, family) in families.iter().enumerate() {
                if family.name == name {
                    mask |= 1_u128 << at;
                }
            }
        }
        if is_any {
            Selection::Some(mask)
        } else {
            Selection::All
        }
    }

    /// The body of a response at `now`.
    pub fn body(&self, format: Format, selection: Selection, now: Instant) -> Vec<u8> {
        let plain = self.fixed(format, selection).plain;
        let mut out = Vec::with_capacity(plain.len() + self.ages.len() * 128 + 512);
        out.extend_from_slice(&plain);
        self.write_ages(&mut out, format, selection, now);
        out.extend_from_slice(format.end());
        out
    }

    /// The body of a response at `now`, as gzip.
    pub fn gzip_body(
        &self,
        format: Format,
        selection: Selection,
        now: Instant,
        deflater: &mut Deflater,
    ) -> Vec<u8> {
        let ready = self.fixed(format, selection);
        let deflated = ready.deflated.clone().unwrap_or_else(|| {
            let mut crc = Crc::new();
            crc.update(&ready.plain);
            let deflated = Arc::new(Deflated {
                bytes: deflater.run(&ready.plain, false),
                crc,
            });
            self.keep_deflated(format, selection, &deflated);
            deflated
        });
        let mut tail = Vec::with_capacity(self.ages.len() * 128 + 512);
        self.write_ages(&mut tail, format, selection, now);
        tail.extend_from_slice(format.end());
        let mut crc = Crc::new();
        crc.update(&tail);
        let mut whole = Crc::new();
        whole.combine(&deflated.crc);
        whole.combine(&crc);

        // RFC 1952: magic, deflate, no flags, no time, fastest, unknown system.
        let mut out = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 4, 255];
        out.extend_from_slice(&deflated.bytes);
        // A stream of its own may follow at a byte boundary: its references reach back only into itself.
        out.extend_from_slice(&deflater.run(&tail, true));
        out.extend_from_slice(&whole.sum().to_le_bytes());
        out.extend_from_slice(&whole.amount().to_le_bytes());
        out
    }

    fn fixed(&self, format: Format, selection: Selection) -> Ready {
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = ready
            .iter()
            .find(|ready| ready.format == format && ready.selection == selection)
        {
            return found.clone();
        }
        let mut plain = Vec::with_capacity(
            self.sections
                .iter()
                .map(|section| section.samples.len() + 256)
                .sum(),
        );
        for (at, section) in self.sections.iter().enumerate() {
            if selection.holds(at) && !section.samples.is_empty() {
                text::header(&mut plain, format, section.family);
                plain.extend_from_slice(&section.samples);
            }
        }
        let made = Ready {
            format,
            selection,
            plain: Arc::new(plain),
            deflated: None,
        };
        if ready.len() >= KEPT {
            ready.remove(0);
        }
        ready.push(made.clone());
        made
    }

    fn keep_deflated(&self, format: Format, selection: Selection, deflated: &Arc<Deflated>) {
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        for kept in ready
            .iter_mut()
            .filter(|ready| ready.format == format && ready.selection == selection)
        {
            kept.deflated = Some(Arc::clone(deflated));
        }
    }

    fn write_ages(&self, out: &mut Vec<u8>, format: Format, selection: Selection, now: Instant) {
        let needs = self.needs(selection);
        let mut written = None;
        for line in &self.ages {
            let (is_needed, family) = match line.group {
                Some(group) => (needs.groups.contains(&group), &gpu::SAMPLE_AGE_SECONDS),
                None => (needs.pods, &pod::SAMPLE_AGE_SECONDS),
            };
            if !is_needed {
                continue;
            }
            if written != Some(family.name) {
                text::header(out, format, family);
                written = Some(family.name);
            }
            out.extend_from_slice(&line.prefix);
            // Tenths of a millisecond are finer than any reading; rounding keeps lines short.
            let age = now.saturating_duration_since(line.at).as_secs_f64();
            text::number(out, (age * 1e4).round() / 1e4);
            out.push(b'\n');
        }
    }

    fn needs(&self, selection: Selection) -> Needs {
        let mut needs = Needs {
            groups: Vec::new(),
            pods: false,
        };
        for (at, section) in self.sections.iter().enumerate() {
            if !selection.holds(at) {
                continue;
            }
            let name = section.family.name;
            if name == gpu::SAMPLE_AGE_SECONDS.name {
                needs.groups.extend(Group::ALL);
            } else if name == pod::SAMPLE_AGE_SECONDS.name {
                needs.pods = true;
            } else {
                match section.family.measured {
                    MeasuredAt::Device(group) => needs.groups.push(group),
                    MeasuredAt::Pod => needs.pods = true,
                    MeasuredAt::Now => {}
                }
            }
        }
        needs
    }
}

struct Needs {
    groups: Vec<Group>,
    pods: bool,
}

impl Selection {
    const fn holds(self, at: usize) -> bool {
        match self {
            Self::All => true,
            Self::Some(mask) => at < 128 && mask >> at & 1 == 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Read as _;
    use std::time::Duration;

    fn page(at: Instant, lines: usize) -> Page {
        let section = |family: &'static Family| {
            let mut samples = Vec::new();
            for line in 0..lines {
                let identity = format!("gpu=\"{line}\"");
                text::Samples::new(&mut samples, family, identity.as_bytes()).value(1.5);
            }
            Section { family, samples }
        };
        let age = |group: Group| AgeLine {
            prefix: format!(
                "gpu_sample_age_seconds{{gpu=\"0\",group=\"{}\"}} ",
                group.as_str()
            )
            .into_bytes(),
            group: Some(group),
            at,
        };
        Page {
            sections: vec![
                section(&gpu::UP),
                section(&gpu::MEMORY_USED_BYTES),
                section(&gpu::POWER_WATTS),
                section(&pod::MEMORY_USED_BYTES),
            ],
            ages: vec![
                age(Group::Memory),
                age(Group::Power),
                AgeLine {
                    prefix: b"gpu_pod_sample_age_seconds{pod_uid=\"u\"} ".to_vec(),
                    group: None,
                    at,
                },
            ],
            ready: Mutex::default(),
        }
    }

    fn families(page: &Page) -> Vec<&'static Family> {
        page.sections.iter().map(|section| section.family).collect()
    }

    fn gunzip(bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        flate2::read::GzDecoder::new(bytes).read_to_end(&mut out).unwrap();
        out
    }

    #[test]
    fn ages_are_those_of_the_response() {
        let at = Instant::now();
        let page = page(at, 1);
        let body = |millis| page.body(Format::Text, Selection::All, at + Duration::from_millis(millis));
        let text = String::from_utf8(body(1500)).unwrap();
        assert!(
            text.contains("gpu_sample_age_seconds{gpu=\"0\",group=\"memory\"} 1.5\n"),
            "{text}"
        );
        assert!(
            String::from_utf8(body(2500))
                .unwrap()
                .contains("group=\"memory\"} 2.5\n")
        );
    }

    #[test]
    fn a_selection_keeps_the_ages_it_needs_and_no_others() {
        let at = Instant::now();
        let page = page(at, 1);
        let select = |names: &[&str]| {
            let selection = Page::select(&families(&page), names.iter().copied());
            String::from_utf8(page.body(Format::Text, selection, at)).unwrap()
        };
        let memory = select(&["gpu_memory_used_bytes"]);
        assert!(memory.contains("gpu_memory_used_bytes{gpu=\"0\"} 1.5\n"));
        assert!(memory.contains("group=\"memory\""));
        assert!(!memory.contains("group=\"power\"") && !memory.contains("gpu_power_watts"));
        assert!(!memory.contains("gpu_pod_sample_age_seconds"));
        let pods = select(&["gpu_pod_memory_used_bytes", "gpu_up"]);
        assert!(pods.contains("gpu_pod_sample_age_seconds{") && pods.contains("gpu_up{"));
        assert!(!pods.contains("gpu_sample_age_seconds{"));
        assert_eq!(select(&["no_such_family"]), "");
        assert_eq!(
            select(&[]),
            String::from_utf8(page.body(Format::Text, Selection::All, at)).unwrap()
        );
    }

    #[test]
    fn openmetrics_ends_with_eof_and_each_family_is_in_one_piece() {
        let at = Instant::now();
        let text = String::from_utf8(page(at, 3).body(Format::OpenMetrics, Selection::All, at)).unwrap();
        assert!(text.ends_with("# EOF\n"));
        assert_eq!(text.matches("# TYPE gpu_sample_age_seconds ").count(), 1);
        assert_eq!(text.matches("# TYPE gpu_pod_sample_age_seconds ").count(), 1);
    }

    #[test]
    fn answers_kept_ready_are_bounded() {
        let at = Instant::now();
        let page = page(at, 1);
        for mask in 0..100 {
            let _ = page.body(Format::Text, Selection::Some(mask), at);
        }
        assert_eq!(page.ready.lock().unwrap().len(), KEPT);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn gzip_bodies_unpack_to_the_plain_ones(lines in 0_usize..800, age in 0_u64..100_000, open in any::<bool>()) {
            let at = Instant::now();
            let page = page(at, lines);
            let format = if open { Format::OpenMetrics } else { Format::Text };
            let mut deflater = Deflater::default();
            for extra in 0..3 {
                let now = at + Duration::from_millis(age + extra);
                let plain = page.body(format, Selection::All, now);
                let packed = page.gzip_body(format, Selection::All, now, &mut deflater);
                prop_assert_eq!(gunzip(&packed), plain);
            }
        }
    }
}
