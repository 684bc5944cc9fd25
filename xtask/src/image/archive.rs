//! A tar file (POSIX ustar) in memory: regular files and folders, sorted, without anything that varies.

use std::collections::BTreeMap;

/// Length of a header and of the unit that file contents are padded to, in bytes.
const BLOCK: usize = 512;

/// Entries by path; folders above an entry are added by themselves.
#[derive(Default)]
pub struct Archive {
    entries: BTreeMap<String, Entry>,
}

struct Entry {
    mode: u32,
    owner: u32,
    kind: Kind,
}

enum Kind {
    File(Vec<u8>),
    Folder,
}

impl Archive {
    /// Adds a file, owned by root.
    pub fn file(&mut self, path: &str, mode: u32, content: Vec<u8>) {
        self.insert(path, Entry { mode, owner: 0, kind: Kind::File(content) });
    }

    /// Adds a folder that belongs to `owner`.
    pub fn folder(&mut self, path: &str, mode: u32, owner: u32) {
        self.insert(path, Entry { mode, owner, kind: Kind::Folder });
    }

    fn insert(&mut self, path: &str, entry: Entry) {
        for (slash, _) in path.match_indices('/') {
            let folder = Entry { mode: 0o755, owner: 0, kind: Kind::Folder };
            self.entries.entry(path[..slash].to_owned()).or_insert(folder);
        }
        self.entries.insert(path.to_owned(), entry);
    }

    /// The bytes of the tar file.
    pub fn finish(self) -> Vec<u8> {
        let mut out = Vec::new();
        for (path, entry) in self.entries {
            let (kind, content) = match &entry.kind {
                Kind::File(content) => (b'0', &content[..]),
                Kind::Folder => (b'5', &[][..]),
            };
            out.extend(header(&path, kind, &entry, content.len()));
            out.extend(content);
            out.resize(out.len().next_multiple_of(BLOCK), 0);
        }
        out.resize(out.len() + 2 * BLOCK, 0);
        out
    }
}

fn header(path: &str, kind: u8, entry: &Entry, len: usize) -> [u8; BLOCK] {
    assert!(path.len() <= 100, "longer paths need the prefix field: {path}");
    let mut header = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, path.as_bytes());
    put(100, format!("{:07o}", entry.mode).as_bytes());
    put(108, format!("{:07o}", entry.owner).as_bytes());
    put(116, format!("{:07o}", entry.owner).as_bytes());
    put(124, format!("{len:011o}").as_bytes());
    put(136, b"00000000000");
    put(148, b"        ");
    put(156, &[kind]);
    put(257, b"ustar\x0000");
    let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    #[test]
    fn tar_lists_what_was_added_with_its_folders() {
        let mut archive = Archive::default();
        archive.file("etc/passwd", 0o644, b"nonroot".to_vec());
        archive.file("armature", 0o755, vec![1; 1000]);
        archive.file("lib64/ld.so", 0o755, vec![]);
        archive.folder("tmp", 0o1777, 65532);
        let bytes = archive.finish();
        let mut tar = Command::new("tar")
            .args(["--list", "--verbose", "--numeric-owner"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("tar");
        tar.stdin.take().expect("piped").write_all(&bytes).expect("tar reads");
        let listed = String::from_utf8(tar.wait_with_output().expect("tar ends").stdout).expect("text");
        let names: Vec<_> =
            listed.lines().map(|l| (&l[..10], l.split_whitespace().skip(5).collect::<Vec<_>>().join(" "))).collect();
        let expected = [
            ("-rwxr-xr-x", "armature"),
            ("drwxr-xr-x", "etc/"),
            ("-rw-r--r--", "etc/passwd"),
            ("drwxr-xr-x", "lib64/"),
            ("-rwxr-xr-x", "lib64/ld.so"),
            ("drwxrwxrwt", "tmp/"),
        ];
        let names: Vec<_> = names.iter().map(|(mode, name)| (*mode, name.trim_end_matches('/'))).collect();
        assert_eq!(names, expected.map(|(mode, name)| (mode, name.trim_end_matches('/'))));
        assert!(listed.contains("65532/65532"));
    }
}
