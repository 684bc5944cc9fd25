//! Whether an arena fits into this machine's memory, asked before anything is reserved.
//!
//! An arena costs nothing until it is touched, so one that is too large starts well and is killed under load. What counts is
//! the least of what the kernel says is available and what is left of the limits of our control groups (a pod's memory limit).

use std::path::Path;

/// An arena that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "--kv-blocks {blocks}{each} needs {:.1} GB ({block_bytes} bytes a block), and {:.1} GB of memory are available{beside}: \
     {fit} blocks{each} fit",
    gb(*.blocks as u128 * *.block_bytes as u128 * *.engines as u128), gb(u128::from(*.available)),
    each = if *.engines == 1 { String::new() } else { format!(" for each of {} workers", .engines) },
    beside = if *.beside == 0 { String::new() } else { format!(" beside {:.1} GB for caches below", gb((*.beside).into())) }
)]
pub struct NoRoom {
    /// Blocks that were asked for.
    pub blocks: usize,
    /// Bytes of one.
    pub block_bytes: usize,
    /// Engines with an arena each.
    pub engines: usize,
    /// Bytes that can be had, beside those for other things.
    pub available: u64,
    /// Bytes for the tiers below the arenas.
    pub beside: u64,
    /// Blocks that each engine could have.
    pub fit: u64,
}

fn gb(bytes: u128) -> f64 {
    bytes as f64 / 1e9
}

/// Checks that `engines` arenas fit beside each other, and beside `beside` bytes more for each. Where the system says nothing
/// of its memory, everything does.
pub fn check(block_bytes: usize, blocks: usize, engines: usize, beside: u64) -> Result<(), NoRoom> {
    let beside = beside.saturating_mul(engines as u64);
    available(Path::new("/")).map_or(Ok(()), |available| within(block_bytes, blocks, engines, available, beside))
}

fn within(block_bytes: usize, blocks: usize, engines: usize, all: u64, beside: u64) -> Result<(), NoRoom> {
    let available = all.saturating_sub(beside);
    let row = (block_bytes as u64).saturating_mul(engines as u64).max(1);
    let fit = available / row;
    if blocks as u64 <= fit { Ok(()) } else { Err(NoRoom { blocks, block_bytes, engines, available, beside, fit }) }
}

/// Bytes of memory that this process may still take.
fn available(root: &Path) -> Option<u64> {
    let meminfo = std::fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let system = value(&meminfo, "MemAvailable:").and_then(|kib| kib.checked_mul(1024));
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    groups.lines().filter_map(|line| group(root, line)).chain(system).min()
}

/// The least that is left in a control group, which is one line of `/proc/self/cgroup`, and in those around it.
fn group(root: &Path, line: &str) -> Option<u64> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?);
    let (folder, files) = match controllers {
        "" => ("sys/fs/cgroup", ["memory.max", "memory.current", "inactive_file"]),
        list if list.split(',').any(|name| name == "memory") => {
            ("sys/fs/cgroup/memory", ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"])
        }
        _ => return None,
    };
    let path = Path::new(path.trim_start_matches('/'));
    // In a container the path may be the host's; then only its root is there, and is ours.
    path.ancestors().filter_map(|path| left(&root.join(folder).join(path), files)).min()
}

/// What is left of one group's limit. Files that the kernel can drop count as free.
fn left(folder: &Path, [limit, usage, droppable]: [&str; 3]) -> Option<u64> {
    let number = |name| std::fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    // "max" is no number, and no limit.
    let limit = number(limit)?;
    let stat = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let used = number(usage).unwrap_or(0).saturating_sub(value(&stat, droppable).unwrap_or(0));
    Some(limit.saturating_sub(used))
}

/// The number after `key`, where a line begins with it.
fn value(text: &str, key: &str) -> Option<u64> {
    let mut words = text.lines().map(str::split_whitespace);
    words.find_map(|mut words| (words.next() == Some(key)).then(|| words.next()?.parse().ok())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine's files.
    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a temporary directory");
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("writable");
            std::fs::write(path, text).expect("writable");
        }
        root
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:    8000 kB\n");

    #[test]
    fn without_a_limit_it_is_what_the_system_has() {
        assert_eq!(available(machine(&[MEMINFO]).path()), Some(8000 * 1024));
        let unlimited = [MEMINFO, ("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/memory.max", "max\n")];
        assert_eq!(available(machine(&unlimited).path()), Some(8000 * 1024));
        assert_eq!(available(machine(&[]).path()), None);
    }

    #[test]
    fn the_tightest_control_group_counts_and_files_in_it_are_free() {
        let root = machine(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/pods/one\n"),
            ("sys/fs/cgroup/pods/memory.max", "5000000\n"),
            ("sys/fs/cgroup/pods/memory.current", "4000000\n"),
            ("sys/fs/cgroup/pods/memory.stat", "anon 1000000\ninactive_file 3000000\n"),
            ("sys/fs/cgroup/pods/one/memory.max", "max\n"),
        ]);
        assert_eq!(available(root.path()), Some(4_000_000));
        let first_version = machine(&[
            MEMINFO,
            ("proc/self/cgroup", "3:cpu,cpuacct:/x\n4:memory:/not/in/here\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n"),
        ]);
        assert_eq!(available(first_version.path()), Some(1_500_000));
    }

    #[test]
    fn too_many_blocks_are_one_line_that_says_how_many_fit() {
        assert_eq!(within(1000, 10, 2, 20_000, 0), Ok(()));
        assert!(within(1000, 10, 2, 20_000, 1).is_err());
        let error = within(368_640, 100_000_000, 2, 16_000_000_000, 0).expect_err("36 TB each");
        assert_eq!(
            error.to_string(),
            "--kv-blocks 100000000 for each of 2 workers needs 73728.0 GB (368640 bytes a block), and 16.0 GB of memory \
             are available: 21701 blocks for each of 2 workers fit"
        );
        let error = within(1_000_000, 9_000, 1, 16_000_000_000, 8_000_000_000).expect_err("9 GB beside 8");
        assert!(
            error.to_string().contains("8.0 GB of memory are available beside 8.0 GB for caches below: 8000"),
            "{error}"
        );
        assert_eq!(within(usize::MAX, usize::MAX, usize::MAX, 1, 0).expect_err("nothing fits").fit, 0);
    }
}
