//! Rust code for the kubelet's gRPC APIs.
//!
//! Purpose: compile the protos of the kubelet's local APIs to client and server code without protoc.
//! Inputs: `exporter/src/attribution/proto/*.proto`.
//! Invariants: pure apart from reading those files and a scratch folder; the same protos give the same text.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

const PROTO_FOLDER: &str = "exporter/src/attribution/proto";
const OUTPUT_FOLDER: &str = "exporter/src/attribution/generated";
const PROTOS: [&str; 3] = ["podresources_v1.proto", "pods_v1alpha1.proto", "corev1.proto"];

/// The generated files: path relative to the repository root, and contents.
///
/// # Errors
/// A proto that does not compile, or a scratch folder that cannot be written.
pub(crate) fn files(root: &Path) -> Result<Vec<(PathBuf, String)>> {
    let folder = root.join(PROTO_FOLDER);
    let descriptors = protox::compile(PROTOS, [&folder]).context("compile the kubelet protos")?;
    let scratch = tempfile::tempdir().context("make a scratch folder")?;
    tonic_prost_build::configure()
        .build_client(true)
        .build_server(true)
        .build_transport(false)
        .out_dir(scratch.path())
        .compile_fds(descriptors)
        .context("generate Rust for the kubelet protos")?;

    let mut files = Vec::new();
    for entry in std::fs::read_dir(scratch.path()).context("read the scratch folder")? {
        let entry = entry?;
        let text = std::fs::read_to_string(entry.path())?;
        files.push((Path::new(OUTPUT_FOLDER).join(entry.file_name()), text));
    }
    files.sort();
    Ok(files)
}
