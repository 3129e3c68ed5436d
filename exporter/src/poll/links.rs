//! NVLink link by link: states, bytes and errors, on the slow tier.
//!
//! Invariants: one batched call for all links; the states of devices without the state field are asked link by
//! link; a sum over links is given only where every link told its part.

use std::time::Instant;

use forewarm_nvml::{Device, Field, FieldQuery, Gap, Number, Scope};

use super::batch::Batch;
use super::tally::Tally;
use crate::snapshot::{Directions, Link, LinkErrors, Links};

/// NVML's own bound for link numbers of this generation (`NVML_NVLINK_MAX_LINKS`), twice for the next.
const MOST_LINKS: u32 = 36;

/// Fields asked of each link.
const PER_LINK: [Field; 6] = [
    Field::NVLINK_STATE,
    Field::NVLINK_TX_KIB,
    Field::NVLINK_RX_KIB,
    Field::NVLINK_REPLAY,
    Field::NVLINK_RECOVERY,
    Field::NVLINK_CRC,
];

/// Sums that the driver gives for links before Hopper.
const TOTALS: [Field; 4] = [
    Field::NVLINK_REPLAY_TOTAL,
    Field::NVLINK_RECOVERY_TOTAL,
    Field::NVLINK_CRC_FLIT_TOTAL,
    Field::NVLINK_CRC_DATA_TOTAL,
];

/// Reads the links of one device.
#[derive(Debug)]
pub(super) struct LinkReader {
    count: Batch,
    known: u32,
    batch: Batch,
}

impl Default for LinkReader {
    fn default() -> Self {
        Self {
            count: Batch::of_gpu(&[Field::NVLINK_COUNT]),
            known: 0,
            batch: Batch::new([]),
        }
    }
}

impl LinkReader {
    /// Reads all links. `None` where the device has none or tells nothing of them.
    pub(super) fn read(
        &mut self,
        device: &mut dyn Device,
        now: Instant,
        tally: &mut Tally<'_>,
    ) -> Option<Links> {
        self.find_out_count(device, now, tally);
        if self.known == 0 {
            return None;
        }
        self.batch.ask(device, now, tally);
        let mut links = Vec::new();
        for number in 0..self.known {
            links.push(self.link(number, device, tally));
        }
        let up = all(links.iter().map(|link| link.up)).map(|up| up.into_iter().filter(|up| *up).count());
        let errors = LinkErrors {
            replay: self.sum(
                &links,
                |errors| errors.replay,
                &[Field::NVLINK_REPLAY_TOTAL],
                tally,
            ),
            recovery: self.sum(
                &links,
                |errors| errors.recovery,
                &[Field::NVLINK_RECOVERY_TOTAL],
                tally,
            ),
            crc: self.sum(
                &links,
                |errors| errors.crc,
                &[Field::NVLINK_CRC_FLIT_TOTAL, Field::NVLINK_CRC_DATA_TOTAL],
                tally,
            ),
        };
        Some(Links {
            up: up.and_then(|up| u32::try_from(up).ok()),
            links,
            errors,
        })
    }

    /// What is known of the fields.
    pub(super) fn support(&self) -> impl Iterator<Item = (&'static str, bool)> + '_ {
        self.count.support().chain(self.batch.support())
    }

    fn find_out_count(&mut self, device: &mut dyn Device, now: Instant, tally: &mut Tally<'_>) {
        if self.known > 0 {
            return; // soldered in
        }
        self.count.ask(device, now, tally);
        let Some(count) = tally.part(
            self.count
                .answer(Field::NVLINK_COUNT, Scope::Gpu)
                .and_then(Number::unsigned),
        ) else {
            return;
        };
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        if count > MOST_LINKS {
            tally.note_entry::<()>(&Err(Gap::Rejected(forewarm_nvml::Rejection::Implausible)));
            return;
        }
        self.known = count;
        let per_link = (0..count).flat_map(|link| {
            PER_LINK
                .iter()
                .map(move |field| FieldQuery::new(*field, Scope::Link(link)))
        });
        let totals = TOTALS.iter().map(|field| FieldQuery::new(*field, Scope::Gpu));
        self.batch = Batch::new(per_link.chain(totals));
    }

    fn link(&self, number: u32, device: &mut dyn Device, tally: &mut Tally<'_>) -> Link {
        let scope = Scope::Link(number);
        let state = self.batch.answer(Field::NVLINK_STATE, scope);
        let up = if self.batch.is_supported(Field::NVLINK_STATE) == Some(false) {
            let up = device.link_is_up(number);
            tally.note(&up);
            up.ok()
        } else {
            match state.and_then(Number::unsigned) {
                Ok(0) => Some(false),
                // 2: asleep to save power, and awake as soon as there is traffic.
                Ok(1 | 2) => Some(true),
                _ => None,
            }
        };
        let counter = |field| self.batch.answer(field, scope).and_then(Number::unsigned).ok();
        let errors = LinkErrors {
            replay: counter(Field::NVLINK_REPLAY),
            recovery: counter(Field::NVLINK_RECOVERY),
            crc: counter(Field::NVLINK_CRC),
        };
        let bytes = |field| self.batch.answer(field, scope).and_then(Number::kib).ok();
        Link {
            up,
            bytes: Directions {
                rx: bytes(Field::NVLINK_RX_KIB),
                tx: bytes(Field::NVLINK_TX_KIB),
            },
            errors,
        }
    }

    fn sum(
        &self,
        links: &[Link],
        pick: impl Fn(&LinkErrors) -> Option<u64>,
        totals: &[Field],
        tally: &mut Tally<'_>,
    ) -> Option<u64> {
        let by_link = all(links.iter().map(|link| pick(&link.errors)));
        let parts = by_link.or_else(|| {
            all(totals
                .iter()
                .map(|field| tally.part(self.batch.answer(*field, Scope::Gpu).and_then(Number::unsigned))))
        })?;
        parts.into_iter().try_fold(0_u64, u64::checked_add)
    }
}

/// All of them, or nothing.
fn all<T>(parts: impl Iterator<Item = Option<T>>) -> Option<Vec<T>> {
    parts.collect()
}
