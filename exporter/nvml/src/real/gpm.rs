//! GPU performance monitoring: two sample buffers per device, swapped, and one batched question.
//!
//! Invariants: buffers are allocated once and reused; after a failure the older sample is forgotten, so a window
//! never spans a hole; after several failures in a row the buffers are made anew (a sample can go bad after an Xid).

use std::sync::Arc;

use nvml_wrapper_sys::bindings::{
    NVML_GPM_METRICS_GET_VERSION, NVML_GPM_SUPPORT_VERSION, nvmlDevice_t, nvmlGpmMetric_t,
    nvmlGpmMetric_t__bindgen_ty_1, nvmlGpmMetricsGet_t, nvmlGpmSample_t, nvmlGpmSupport_t,
};

use super::Inner;
use crate::call::{Call, InFlight};
use crate::model::Gpm;
use crate::quantity::Ratio;
use crate::reading::{Code, Gap, Reading};

/// SM utilisation, SM occupancy, any tensor pipe, DRAM bandwidth: all in percent.
const IDS: [u32; 4] = [2, 3, 5, 10];

/// Failures in a row after which buffers are made anew.
const FAILURES_BEFORE_RENEWAL: u32 = 5;

/// GPM of one device.
pub(super) struct Sampler {
    inner: Arc<Inner>,
    device: nvmlDevice_t,
    in_flight: Arc<InFlight>,
    supported: Option<bool>,
    buffers: Option<Buffers>,
    failures: u32,
}

struct Buffers {
    older: nvmlGpmSample_t,
    newer: nvmlGpmSample_t,
    older_is_filled: bool,
    request: Box<nvmlGpmMetricsGet_t>,
}

impl Sampler {
    pub(super) fn new(inner: Arc<Inner>, device: nvmlDevice_t, in_flight: Arc<InFlight>) -> Self {
        Self {
            inner,
            device,
            in_flight,
            supported: None,
            buffers: None,
            failures: 0,
        }
    }

    pub(super) fn read(&mut self) -> Reading<Gpm> {
        let outcome = self.try_read();
        match outcome {
            Ok(_) | Err(Gap::NotYet) => self.failures = 0,
            Err(_) => {
                self.failures += 1;
                if let Some(buffers) = &mut self.buffers {
                    buffers.older_is_filled = false;
                }
                if self.failures.is_multiple_of(FAILURES_BEFORE_RENEWAL) {
                    self.release();
                    self.supported = None;
                }
            }
        }
        outcome
    }

    fn try_read(&mut self) -> Reading<Gpm> {
        if self.supported.is_none() {
            self.supported = Some(self.query_support()?);
        }
        if self.supported == Some(false) {
            // Asked anew next time: the caller decides how often an unsupported reading is worth a call.
            self.supported = None;
            return Err(Gap::Unsupported);
        }
        if self.buffers.is_none() {
            self.buffers = Some(self.allocate()?);
        }
        let Some(buffers) = &mut self.buffers else {
            return Err(Gap::NotYet);
        };
        let (inner, device) = (&self.inner, self.device);
        let newer = buffers.newer;
        let call = Call::GpmSampleGet;
        inner
            .hot(
                Some(&self.in_flight),
                call,
                &inner.lib().nvmlGpmSampleGet,
                |symbol| {
                    // SAFETY: handle and buffer come from this library, which `inner` keeps open.
                    unsafe { symbol(device, newer) }
                },
            )
            .map_err(|code| code.gap(call))?;
        if !buffers.older_is_filled {
            std::mem::swap(&mut buffers.older, &mut buffers.newer);
            buffers.older_is_filled = true;
            return Err(Gap::NotYet);
        }
        buffers.request.version = NVML_GPM_METRICS_GET_VERSION;
        buffers.request.numMetrics = u32::try_from(IDS.len()).unwrap_or(0);
        buffers.request.sample1 = buffers.older;
        buffers.request.sample2 = buffers.newer;
        for (slot, id) in buffers.request.metrics.iter_mut().zip(IDS) {
            *slot = empty_metric();
            slot.metricId = id;
        }
        let request = &raw mut *buffers.request;
        let call = Call::GpmMetricsGet;
        inner
            .hot(
                Some(&self.in_flight),
                call,
                &inner.lib().nvmlGpmMetricsGet,
                |symbol| {
                    // SAFETY: the request is a valid struct of the header's layout with both samples filled.
                    unsafe { symbol(request) }
                },
            )
            .map_err(|code| code.gap(call))?;
        std::mem::swap(&mut buffers.older, &mut buffers.newer);
        let [sm_active, sm_occupancy, tensor_active, dram_active] =
            std::array::from_fn(|at| buffers.request.metrics.get(at).map_or(Err(Gap::NotYet), decode));
        Ok(Gpm {
            sm_active,
            sm_occupancy,
            tensor_active,
            dram_active,
        })
    }

    fn query_support(&self) -> Reading<bool> {
        let mut support = nvmlGpmSupport_t {
            version: NVML_GPM_SUPPORT_VERSION,
            isSupportedDevice: 0,
        };
        let call = Call::GpmSupport;
        let outcome = self.inner.hot(
            Some(&self.in_flight),
            call,
            &self.inner.lib().nvmlGpmQueryDeviceSupport,
            // SAFETY: the handle comes from this library; the out pointer is valid for the call.
            |symbol| unsafe { symbol(self.device, &raw mut support) },
        );
        match outcome {
            Ok(()) => Ok(support.isSupportedDevice != 0),
            Err(code) => Err(code.gap(call)),
        }
    }

    fn allocate(&self) -> Reading<Buffers> {
        let older = self.allocate_one()?;
        let newer = match self.allocate_one() {
            Ok(sample) => sample,
            Err(gap) => {
                self.free(older);
                return Err(gap);
            }
        };
        Ok(Buffers {
            older,
            newer,
            older_is_filled: false,
            request: Box::new(nvmlGpmMetricsGet_t {
                version: NVML_GPM_METRICS_GET_VERSION,
                numMetrics: 0,
                sample1: std::ptr::null_mut(),
                sample2: std::ptr::null_mut(),
                metrics: [empty_metric(); 210],
            }),
        })
    }

    fn allocate_one(&self) -> Reading<nvmlGpmSample_t> {
        let mut sample: nvmlGpmSample_t = std::ptr::null_mut();
        let call = Call::GpmSampleAlloc;
        self.inner
            .hot(
                Some(&self.in_flight),
                call,
                &self.inner.lib().nvmlGpmSampleAlloc,
                |symbol| {
                    // SAFETY: the out pointer is valid for the call.
                    unsafe { symbol(&raw mut sample) }
                },
            )
            .map_err(|code| code.gap(call))?;
        if sample.is_null() {
            Err(Code::NO_DATA.gap(call))
        } else {
            Ok(sample)
        }
    }

    fn free(&self, sample: nvmlGpmSample_t) {
        if let Ok(free) = self.inner.lib().nvmlGpmSampleFree.as_ref() {
            // SAFETY: the sample came from this library and is used by nobody else.
            let _ = unsafe { free(sample) };
        }
    }

    fn release(&mut self) {
        if let Some(buffers) = self.buffers.take() {
            self.free(buffers.older);
            self.free(buffers.newer);
        }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.release();
    }
}

fn decode(metric: &nvmlGpmMetric_t) -> Reading<Ratio> {
    match metric.nvmlReturn {
        0 => Ratio::from_percent(metric.value),
        code => Err(Code(code).gap(Call::GpmMetricsGet)),
    }
}

const fn empty_metric() -> nvmlGpmMetric_t {
    nvmlGpmMetric_t {
        metricId: 0,
        nvmlReturn: 0,
        // A driver that fills nothing in must not look like an idle GPU.
        value: f64::NAN,
        metricInfo: nvmlGpmMetric_t__bindgen_ty_1 {
            shortName: std::ptr::null_mut(),
            longName: std::ptr::null_mut(),
            unit: std::ptr::null_mut(),
        },
    }
}
