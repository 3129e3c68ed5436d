//! Families of `/metrics/detail`: link by link, and what each device offers.
//!
//! Invariants: the table holds every family of `signals::gpu::DETAIL` once, in its order (tested).

use forewarm_signals::label::{DIRECTION, KIND, LINK, READING};
use forewarm_signals::{Family, gpu};

use super::device::{Device, Write, each_direction};

/// The families of `/metrics/detail`.
pub const FAMILIES: &[(&Family, Write)] = &[
    (&gpu::NVLINK_LINK_UP, |device, out| {
        each_link(device, |number, link| {
            if let Some(up) = link.up {
                out.count(&[(LINK, number)], u64::from(up));
            }
        });
    }),
    (&gpu::NVLINK_LINK_BYTES_TOTAL, |device, out| {
        each_link(device, |number, link| {
            each_direction(&link.bytes, |direction, bytes| {
                out.count(&[(LINK, number), (DIRECTION, direction)], bytes.get());
            });
        });
    }),
    (&gpu::NVLINK_LINK_ERRORS_TOTAL, |device, out| {
        each_link(device, |number, link| {
            for (kind, errors) in link.errors.kinds() {
                if let Some(errors) = errors {
                    out.count(&[(LINK, number), (KIND, kind)], errors);
                }
            }
        });
    }),
    (&gpu::READING_SUPPORTED, |device, out| {
        for (name, is_supported) in device.snapshot.support.iter() {
            out.count(&[(READING, name)], u64::from(*is_supported));
        }
    }),
];

fn each_link(device: &Device, mut write: impl FnMut(&str, &crate::snapshot::Link)) {
    let Some(links) = &device.snapshot.links else {
        return;
    };
    for (number, link) in links.value.links.iter().enumerate() {
        write(itoa::Buffer::new().format(number), link);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_detail_family_has_a_writer() {
        let written: Vec<_> = FAMILIES.iter().map(|(family, _)| family.name).collect();
        assert_eq!(
            written,
            gpu::DETAIL.iter().map(|family| family.name).collect::<Vec<_>>()
        );
    }
}
