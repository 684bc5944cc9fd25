//! What is inside the product's image: the binary, the libraries it is linked to, a user, and CA certificates.

use std::path::Path;

use anyhow::{Context, bail};

use super::NONROOT;
use super::archive::Archive;
use crate::process::{command, quiet};

/// Libraries that glibc before 2.34 loads by name to resolve host names; not in `ldd`'s list.
const RESOLVER: &[&str] = &["libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2"];

/// Where certificate authorities are on Debian, Fedora and Alpine.
const CERTIFICATES: &[&str] =
    &["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

/// The layer as a tar file.
pub fn product(binary: &Path) -> anyhow::Result<Vec<u8>> {
    let mut layer = Archive::default();
    layer.file("armature", 0o755, stripped(binary)?);
    for library in libraries(binary)? {
        layer.file(library.trim_start_matches('/'), 0o755, read(Path::new(&library))?);
        let folder = Path::new(&library).parent().unwrap_or(Path::new("/"));
        for name in RESOLVER {
            let path = folder.join(name);
            if library.contains("libc.so") && path.exists() {
                layer.file(path.to_string_lossy().trim_start_matches('/'), 0o755, read(&path)?);
            }
        }
    }
    if let Some(certificates) = CERTIFICATES.iter().map(Path::new).find(|path| path.exists()) {
        layer.file("etc/ssl/certs/ca-certificates.crt", 0o644, read(certificates)?);
    }
    let user = format!("root:x:0:0:root:/:/\nnonroot:x:{NONROOT}:{NONROOT}:nonroot:/tmp:/\n");
    layer.file("etc/passwd", 0o644, user.into_bytes());
    layer.file("etc/group", 0o644, format!("root:x:0:\nnonroot:x:{NONROOT}:\n").into_bytes());
    layer.file("etc/nsswitch.conf", 0o644, b"hosts: files dns\n".to_vec());
    layer.folder("tmp", 0o1777, 0);
    Ok(layer.finish())
}

/// Paths of the shared libraries, the loader included, from lines like `libm.so.6 => /lib/…/libm.so.6 (0x…)`.
fn libraries(binary: &Path) -> anyhow::Result<Vec<String>> {
    let listed = quiet(command("ldd").arg(binary))?;
    if let Some(missing) = listed.lines().find(|line| line.contains("not found")) {
        bail!("{}: {}", binary.display(), missing.trim());
    }
    Ok(paths(&listed))
}

fn paths(listed: &str) -> Vec<String> {
    listed
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(str::to_owned)
        .collect()
}

/// The binary without symbols, from a copy: the original keeps them for backtraces and profilers.
fn stripped(binary: &Path) -> anyhow::Result<Vec<u8>> {
    let copy = binary.with_extension("stripped");
    quiet(command("strip").arg("-o").arg(&copy).arg(binary))?;
    let bytes = read(&copy)?;
    std::fs::remove_file(copy)?;
    Ok(bytes)
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_taken_from_every_form_of_line() {
        let listed = "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(paths(listed), ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/ld-linux-x86-64.so.2"]);
    }
}
