//! Readings as text: rendered at most once a tick, on the first scrape that needs it.
//!
//! Purpose: turn the fleet and the attribution into a [`page::Page`] that any number of responses share.
//! Inputs: the fleet's snapshots, the attribution view, counts.
//! Invariants: never touches NVML or a socket; a page is made anew only when something changed or a tick has passed
//! (so withdrawal needs no new reading); buffers of a page nobody reads any more are used again.

pub mod detail;
pub mod device;
pub mod negotiate;
pub mod page;
mod pods;
pub mod text;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forewarm_nvml::Rejection;
use forewarm_signals::label::{GPU, GROUP, REASON, UUID};
use forewarm_signals::{Family, Group, gpu, own, pod};

use self::device::Device;
use self::page::{AgeLine, Page, Section};
use self::text::Samples;
use crate::attribution::{Attribution, AttributionView, join};
use crate::poll::PollCounts;
use crate::snapshot::{Fleet, LibraryState};

/// Every family of `/metrics` in the order of the page.
pub fn families() -> Vec<&'static Family> {
    device::FAMILIES
        .iter()
        .map(|(family, _)| *family)
        .chain(std::iter::once(&gpu::SAMPLE_AGE_SECONDS))
        .chain(pods::ROWS.iter().map(|(family, _)| *family))
        .chain(std::iter::once(&pod::SAMPLE_AGE_SECONDS))
        .chain(pods::INVENTORY)
        .chain(own::BESIDE_READINGS)
        .collect()
}

/// Makes pages.
#[derive(Debug)]
pub struct Renderer {
    fleet: Arc<Fleet>,
    attribution: AttributionView,
    counts: Arc<PollCounts>,
    families: Vec<&'static Family>,
    detail_families: Vec<&'static Family>,
    start: Instant,
    latest: Mutex<Option<Latest>>,
}

#[derive(Debug)]
struct Latest {
    key: Key,
    page: Arc<Page>,
}

/// What a page depends on.
#[derive(Debug)]
struct Key {
    version: u64,
    /// Held, so that no later attribution can lie at the same address and pass for this one.
    attribution: Arc<Attribution>,
    tick: u128,
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.version == other.version
            && self.tick == other.tick
            && Arc::ptr_eq(&self.attribution, &other.attribution)
    }
}

impl Renderer {
    /// A renderer of these sources.
    #[must_use]
    pub fn new(fleet: Arc<Fleet>, attribution: AttributionView, counts: Arc<PollCounts>) -> Self {
        Self {
            fleet,
            attribution,
            counts,
            families: families(),
            detail_families: detail::FAMILIES.iter().map(|(family, _)| *family).collect(),
            start: Instant::now(),
            latest: Mutex::new(None),
        }
    }

    /// The families of the detail page, for selections.
    #[must_use]
    pub fn detail_families(&self) -> &[&'static Family] {
        &self.detail_families
    }

    /// The families of the page, for selections.
    #[must_use]
    pub fn families(&self) -> &[&'static Family] {
        &self.families
    }

    /// The page at `now`, and how long it took if it was made anew.
    pub fn page(&self, now: Instant) -> (Arc<Page>, Option<Duration>) {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let attribution = self.attribution.load();
        let since = now.saturating_duration_since(self.start).as_nanos();
        let key = Key {
            version: self.fleet.version(),
            attribution: Arc::clone(&attribution),
            tick: since / self.fleet.interval().as_nanos().max(1),
        };
        if let Some(latest) = latest.as_ref().filter(|latest| latest.key == key) {
            return (Arc::clone(&latest.page), None);
        }
        let started = Instant::now();
        let reused = latest
            .take()
            .and_then(|latest| Arc::into_inner(latest.page))
            .unwrap_or_default();
        let page = Arc::new(self.render(reused, &attribution, now));
        *latest = Some(Latest {
            key,
            page: Arc::clone(&page),
        });
        (page, Some(started.elapsed()))
    }

    /// The detail page at `now`, made for this response alone.
    #[must_use]
    pub fn detail(&self, now: Instant) -> Page {
        let devices = self.devices(now);
        let mut page = Page::default();
        for (family, write) in detail::FAMILIES {
            let mut samples = Vec::new();
            for device in &devices {
                device::write(family, *write, device, &mut samples);
            }
            page.sections.push(Section { family, samples });
        }
        device_ages(&devices, now, &mut page.ages);
        page
    }

    fn devices(&self, now: Instant) -> Vec<Device> {
        let state = self.fleet.load();
        state
            .devices
            .iter()
            .map(|slot| Device::take(slot, now, self.fleet.interval()))
            .collect()
    }

    fn render(&self, reused: Page, attribution: &Attribution, now: Instant) -> Page {
        let devices = self.devices(now);
        let views = pods::views(&devices);
        let joined = join::join(attribution, &views);
        self.attribution.record_gaps(&joined.gaps);
        let rows: Vec<_> = joined.rows.iter().map(|row| (row, pods::identity(row))).collect();

        let mut buffers = reused.sections.into_iter().map(|section| section.samples);
        let mut page = Page::default();
        let mut section = |family: &'static Family, fill: &mut dyn FnMut(&mut Vec<u8>)| {
            let mut samples = buffers.next().unwrap_or_default();
            samples.clear();
            fill(&mut samples);
            page.sections.push(Section { family, samples });
        };
        for (family, write) in device::FAMILIES {
            section(family, &mut |out| {
                for device in &devices {
                    device::write(family, *write, device, out);
                }
            });
        }
        section(&gpu::SAMPLE_AGE_SECONDS, &mut |_| {});
        for (family, write) in pods::ROWS {
            section(family, &mut |out| {
                for (row, identity) in &rows {
                    write(row, &mut Samples::new(out, family, identity));
                }
            });
        }
        section(&pod::SAMPLE_AGE_SECONDS, &mut |_| {});
        for family in pods::INVENTORY {
            section(family, &mut |out| pods::inventory(family, &joined, out));
        }
        for family in own::BESIDE_READINGS {
            section(family, &mut |out| {
                self.write_own(family, &mut Samples::new(out, family, b""));
            });
        }
        device_ages(&devices, now, &mut page.ages);
        pods::ages(&joined, &mut page.ages);
        page
    }

    fn write_own(&self, family: &Family, out: &mut Samples<'_>) {
        use std::sync::atomic::Ordering::Relaxed;
        match family.name {
            name if name == own::BUILD_INFO.name => {
                out.count(
                    &[
                        ("version", env!("CARGO_PKG_VERSION")),
                        ("program", crate::PROGRAM),
                    ],
                    1,
                );
            }
            name if name == own::NVML_UP.name => {
                let is_open = matches!(self.fleet.load().library, LibraryState::Open { .. });
                out.count(&[], u64::from(is_open));
            }
            name if name == own::NVML_OPENS_TOTAL.name => out.count(&[], self.counts.opens.load(Relaxed)),
            name if name == own::STUCK_GPUS.name => out.count(&[], self.counts.stuck.load(Relaxed)),
            _ => {
                for (reason, count) in self.counts.rejected() {
                    let reason: Rejection = reason;
                    out.count(&[(REASON, reason.as_str())], count);
                }
            }
        }
    }
}

fn device_ages(devices: &[Device], now: Instant, out: &mut Vec<AgeLine>) {
    for device in devices {
        let index = device.snapshot.index.to_string();
        for group in Group::ALL {
            let Some(at) = device.measured_at(group, now) else {
                continue;
            };
            let mut prefix = Vec::with_capacity(128);
            prefix.extend_from_slice(gpu::SAMPLE_AGE_SECONDS.name.as_bytes());
            prefix.push(b'{');
            text::labels(
                &mut prefix,
                [
                    (GPU, index.as_str()),
                    (UUID, device.snapshot.uuid()),
                    (GROUP, group.as_str()),
                ],
            );
            prefix.extend_from_slice(b"} ");
            out.push(AgeLine {
                prefix,
                group: Some(group),
                at,
            });
        }
    }
}
