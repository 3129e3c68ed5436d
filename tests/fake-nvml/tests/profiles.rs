//! Each GPU model: what it answers, what it does not, and under which driver.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, outside #[test] functions"
)]
#![allow(
    unsafe_code,
    reason = "scopes, platform and links are reached with raw calls; pointers are to locals of the right type"
)]

mod support;

use forewarm_fake_nvml::profile::BUILT_IN;
use forewarm_fake_nvml::settings::Settings;
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::GpuVirtualizationMode;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::*;
use support::Fake;

/// Field `id` of GPU 0 in `scope`, as its 64 bits.
fn field(nvml: &Nvml, id: u32, scope: u32) -> Result<u64, u32> {
    // SAFETY: plain C data; one entry; integers are read from zeroed 64 bits.
    unsafe {
        let gpu = nvml.device_by_index(0).unwrap();
        let mut value: nvmlFieldValue_t = std::mem::zeroed();
        (value.fieldId, value.scopeId) = (id, scope);
        assert_eq!(
            nvml.lib()
                .nvmlDeviceGetFieldValues(gpu.handle(), 1, &raw mut value),
            0
        );
        if value.nvmlReturn == 0 {
            Ok(value.value.ullVal)
        } else {
            Err(value.nvmlReturn)
        }
    }
}

#[test]
fn models_differ_in_what_they_answer() {
    // Name, GPM, MIG, NVLink count, ECC, power average, memory temperature.
    let expected = [
        ("t4", (false, false, 0, true, false, false)),
        ("v100-sxm2-32gb", (false, false, 6, true, false, true)),
        ("a100-sxm4-40gb", (false, true, 12, true, false, true)),
        ("l40s", (false, false, 0, true, true, false)),
        ("l40s-24c-vgpu", (false, false, 0, true, false, false)),
        ("rtx-4090", (false, false, 0, false, true, false)),
        ("h100-sxm", (true, true, 18, true, true, true)),
        ("h200-sxm", (true, true, 18, true, true, true)),
        ("gb200-nvl72", (true, true, 18, true, true, true)),
    ];
    assert_eq!(expected.map(|(name, _)| name), BUILT_IN);
    for (name, answers) in expected {
        let fake = Fake::profile(name);
        let nvml = fake.nvml();
        let device = nvml.device_by_index(0).unwrap();
        let told = (
            device.gpm_support().unwrap(),
            device.mig_mode().is_ok(),
            field(&nvml, 91, 0).unwrap_or(0),
            device.is_ecc_enabled().is_ok(),
            field(&nvml, 185, 0).is_ok(),
            field(&nvml, 82, 0).is_ok(),
        );
        assert_eq!(told, answers, "{name}");
        assert_eq!(device.utilization_rates().unwrap().gpu, 0, "{name}");
    }
}

#[test]
fn a_guest_is_told_of_its_share_and_not_of_the_board() {
    let fake = Fake::profile("l40s-24c-vgpu");
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    assert_eq!(device.virtualization_mode().unwrap(), GpuVirtualizationMode::Vgpu);
    assert_eq!(device.memory_info().unwrap().total, 24_576 << 20);
    assert!(device.running_compute_processes().is_ok());
    for refused in [
        device.power_usage().map(drop),
        device.temperature(TemperatureSensor::Gpu).map(drop),
        device.total_energy_consumption().map(drop),
        device.serial().map(drop),
    ] {
        assert!(matches!(refused, Err(NvmlError::NotSupported)), "{refused:?}");
    }
    assert_eq!(field(&nvml, 186, 0), Err(3));
    assert_eq!(field(&nvml, 1, 0), Ok(1), "its ECC mode is told");
}

#[test]
fn a_gb200_counts_nvlink_bytes_and_tells_module_power_and_place() {
    let mut fake = Fake::new(Settings {
        profile: Some("gb200-nvl72".into()),
        virtual_time: Some(true),
        ..Settings::default()
    });
    fake.set(|control| {
        control.now_ms = Some(1_000);
        control.gpu(0).nvlink_tx_bytes_per_second = Some(18.0 * 4096.0);
        control.gpu(0).nvlink_errors.get_or_insert_default().symbol = 7;
    });
    let nvml = fake.nvml();
    field(&nvml, 91, 0).unwrap();
    fake.set(|control| control.now_ms = Some(3_000));
    assert_eq!(field(&nvml, 202, 5), Ok(8_192), "two seconds of one link");
    assert_eq!(field(&nvml, 202, u32::MAX), Ok(18 * 8_192));
    assert_eq!(field(&nvml, 201, u32::MAX), Ok(18 * 32));
    assert_eq!(
        field(&nvml, 138, u32::MAX),
        Ok(18 * 8),
        "kibibytes are counted still"
    );
    assert_eq!((field(&nvml, 221, 0), field(&nvml, 221, 1)), (Ok(7), Ok(0)));
    assert_eq!(field(&nvml, 202, 18), Err(2));
    assert_eq!((field(&nvml, 170, 0), field(&nvml, 171, 9)), (Ok(10), Ok(1)));
    assert_eq!(
        (field(&nvml, 186, 0), field(&nvml, 186, 1)),
        (Ok(160_000), Ok(420_000))
    );
    assert_eq!(field(&nvml, 186, 2), Err(3));

    let gpu = nvml.device_by_index(2).unwrap();
    // SAFETY: the out pointers are to locals of the right type.
    unsafe {
        let mut place: nvmlPlatformInfo_v2_t = std::mem::zeroed();
        place.version = u32::try_from(size_of::<nvmlPlatformInfo_v2_t>()).unwrap() | (2 << 24);
        assert_eq!(
            nvml.lib().nvmlDeviceGetPlatformInfo(gpu.handle(), &raw mut place),
            0
        );
        assert_eq!(
            (place.moduleId, place.trayIndex, place.chassisSerialNumber[0]),
            (3, 7, b'1')
        );
        let mut fabric: nvmlGpuFabricInfo_v3_t = std::mem::zeroed();
        fabric.version = u32::try_from(size_of::<nvmlGpuFabricInfo_v3_t>()).unwrap() | (3 << 24);
        assert_eq!(
            nvml.lib()
                .nvmlDeviceGetGpuFabricInfoV(gpu.handle(), &raw mut fabric),
            0
        );
        assert_eq!(
            (fabric.state, fabric.cliqueId, fabric.clusterUuid[0]),
            (3, 1, 0x5e)
        );
        let mut c2c = nvmlC2cModeInfo_v1_t { isC2cEnabled: 0 };
        assert_eq!(
            nvml.lib().nvmlDeviceGetC2cModeInfoV(gpu.handle(), &raw mut c2c),
            0
        );
        assert_eq!(c2c.isC2cEnabled, 1);
    }
    let mut count = 0;
    // SAFETY: no array, so only the count is written.
    let legacy = unsafe {
        nvml.lib()
            .nvmlDeviceGetProcessUtilization(gpu.handle(), std::ptr::null_mut(), &raw mut count, 0)
    };
    assert_eq!(legacy, 3, "Blackwell under 580 has the newer call only");
    let h100 = Fake::h100();
    assert_eq!(field(&h100.nvml(), 202, 0), Err(3), "NVLink 4 does not");
    assert_eq!(field(&h100.nvml(), 186, 1), Err(3));
}

#[test]
fn links_without_a_switch_end_on_other_gpus() {
    let fake = Fake::profile("v100-sxm2-32gb");
    let nvml = fake.nvml();
    let device = nvml.device_by_index(2).unwrap();
    for number in 0..6 {
        let link = device.link_wrapper_for(number);
        let mut kind = 255;
        // Raw: the wrapper's own getter answers "unknown" whatever the library says.
        // SAFETY: an out pointer to a local.
        let code = unsafe {
            nvml.lib()
                .nvmlDeviceGetNvLinkRemoteDeviceType(device.handle(), number, &raw mut kind)
        };
        assert_eq!(
            (code, kind),
            (0, nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU)
        );
        let peer = link.remote_pci_info().unwrap().bus_id;
        let found = nvml.device_by_pci_bus_id(peer).unwrap().index().unwrap();
        assert_ne!(found, 2);
    }
}

#[test]
fn a_node_may_have_several_models() {
    let fake = Fake::new(Settings {
        profile: Some("rtx-4090,t4,h100-sxm".into()),
        gpus: Some(4),
        ..Settings::default()
    });
    let nvml = fake.nvml();
    let told: Vec<(String, bool, bool)> = (0..nvml.device_count().unwrap())
        .map(|index| {
            let device = nvml.device_by_index(index).unwrap();
            (
                device.name().unwrap(),
                device.gpm_support().unwrap(),
                device.serial().is_ok(),
            )
        })
        .collect();
    let h100 = ("NVIDIA H100 80GB HBM3".to_owned(), true, true);
    assert_eq!(
        told,
        [
            ("NVIDIA GeForce RTX 4090".to_owned(), false, false),
            ("Tesla T4".to_owned(), false, true),
            h100.clone(),
            h100
        ]
    );
    let three = Fake::profile("t4,l40s,t4");
    assert_eq!(three.nvml().device_count().unwrap(), 3);
}

#[test]
fn every_model_runs_under_every_driver_it_is_modelled_with() {
    for name in BUILT_IN {
        for driver in [
            "470.256.02",
            "510.108.03",
            "535.183.06",
            "550.127.05",
            "570.133.20",
            "580.65.06",
            "580.95.05",
        ] {
            let fake = Fake::new(Settings {
                profile: Some(name.into()),
                driver: Some(driver.into()),
                ..Settings::default()
            });
            let nvml = fake.nvml();
            let device = nvml.device_by_index(0).unwrap();
            assert!(
                device.name().is_ok() && device.utilization_rates().is_ok(),
                "{name} {driver}"
            );
            let major: u32 = driver[..3].parse().unwrap();
            let has_new_calls = nvml.lib().nvmlSystemEventSetCreate.is_ok();
            assert_eq!(has_new_calls, major >= 580, "{driver}");
            assert_eq!(
                nvml.lib().nvmlDeviceGetMemoryInfo_v2.is_ok(),
                major >= 510,
                "{driver}"
            );
            let instant_power = field(&nvml, 186, 0);
            let expected_unknown = major < 535;
            assert_eq!(instant_power == Err(2), expected_unknown, "{name} {driver}");
        }
    }
}
