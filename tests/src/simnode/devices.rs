//! Which container holds which GPU, as NVIDIA's device plugin hands them out.
//!
//! Invariants: a GPU has at most one holder; devices are handed out in index order, lowest free first;
//! they are free again when the pod has ended, before its object is gone.

use std::collections::BTreeMap;

/// Identity of a container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// UID of the pod.
    pub pod_uid: String,
    /// Name of the container.
    pub container: String,
}

/// Not enough free GPUs: the scheduler and this node disagree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{wanted} GPUs requested, {free} free")]
pub struct TooFew {
    /// How many were asked for.
    pub wanted: u32,
    /// How many are free.
    pub free: u32,
}

/// The GPUs of one node.
#[derive(Debug, Clone)]
pub struct Devices {
    uuids: Vec<String>,
    holders: BTreeMap<u32, Holder>,
}

impl Devices {
    /// GPUs with these UUIDs, by index, all free.
    #[must_use]
    pub fn new(uuids: Vec<String>) -> Self {
        Self {
            uuids,
            holders: BTreeMap::new(),
        }
    }

    /// UUIDs by index.
    #[must_use]
    pub fn uuids(&self) -> &[String] {
        &self.uuids
    }

    /// Hands `count` GPUs to a container.
    ///
    /// # Errors
    /// [`TooFew`], with nothing handed out.
    pub fn allocate(&mut self, holder: &Holder, count: u32) -> Result<Vec<u32>, TooFew> {
        let total = u32::try_from(self.uuids.len()).unwrap_or(u32::MAX);
        let free: Vec<u32> = (0..total)
            .filter(|index| !self.holders.contains_key(index))
            .collect();
        let chosen: Vec<u32> = free.iter().copied().take(count as usize).collect();
        if chosen.len() < count as usize {
            return Err(TooFew {
                wanted: count,
                free: u32::try_from(free.len()).unwrap_or(u32::MAX),
            });
        }
        for &index in &chosen {
            self.holders.insert(index, holder.clone());
        }
        Ok(chosen)
    }

    /// Takes back all GPUs of a pod.
    pub fn release(&mut self, pod_uid: &str) {
        self.holders.retain(|_, holder| holder.pod_uid != pod_uid);
    }

    /// Who holds what: index, UUID, holder.
    pub fn held(&self) -> impl Iterator<Item = (u32, &str, &Holder)> {
        self.holders
            .iter()
            .filter_map(|(&index, holder)| Some((index, self.uuid(index)?, holder)))
    }

    /// UUID of one GPU.
    #[must_use]
    pub fn uuid(&self, index: u32) -> Option<&str> {
        self.uuids.get(index as usize).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(uid: &str) -> Holder {
        Holder {
            namespace: "n".into(),
            pod: uid.into(),
            pod_uid: uid.into(),
            container: "c".into(),
        }
    }

    #[test]
    fn gpus_have_one_holder_and_return_with_the_pod() {
        let mut devices = Devices::new(vec!["GPU-a".into(), "GPU-b".into(), "GPU-c".into()]);
        assert_eq!(devices.allocate(&holder("1"), 2), Ok(vec![0, 1]));
        assert_eq!(
            devices.allocate(&holder("2"), 2),
            Err(TooFew { wanted: 2, free: 1 })
        );
        assert_eq!(devices.allocate(&holder("2"), 1), Ok(vec![2]));
        devices.release("1");
        assert_eq!(devices.allocate(&holder("3"), 1), Ok(vec![0]));
        let held: Vec<_> = devices
            .held()
            .map(|(index, uuid, holder)| (index, uuid, &*holder.pod))
            .collect();
        assert_eq!(held, vec![(0, "GPU-a", "3"), (2, "GPU-c", "2")]);
    }
}
