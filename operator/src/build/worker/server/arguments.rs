//! Arguments of servers as their authors write them: which one it is, and what it says.

/// An argument's name as servers read it: with `-` where `_` was written, too, and the value that came with it.
pub(super) fn named(arg: &str) -> Option<(String, Option<&str>)> {
    let (name, value) = arg.split_once('=').map_or((arg, None), |(name, value)| (name, Some(value)));
    let name = name.strip_prefix("--").or_else(|| name.strip_prefix('-'))?;
    Some((name.replace('_', "-"), value))
}

/// Whether it is there.
pub(super) fn is_set(args: &[String], name: &str) -> bool {
    args.iter().filter_map(|arg| named(arg)).any(|(found, _)| found == name)
}

/// The value that counts of an argument, written `--name=value` or as two arguments.
pub(super) fn last<'a>(args: &'a [String], name: &str) -> Option<&'a str> {
    args.iter().enumerate().rev().find_map(|(at, arg)| {
        let (found, value) = named(arg)?;
        if found == name { value.or_else(|| args.get(at + 1).map(String::as_str)) } else { None }
    })
}

/// `name=value` of those that are set.
pub(super) fn set(args: &[String], names: &[&str]) -> Vec<String> {
    names.iter().filter_map(|name| Some(format!("{name}={}", last(args, name)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_one_counts_however_it_is_written() {
        let args = ["--a=1", "-b", "2", "--a_b", "3", "--a-b=4", "--c", "model"].map(String::from);
        assert_eq!((last(&args, "a"), last(&args, "b"), last(&args, "a-b")), (Some("1"), Some("2"), Some("4")));
        assert_eq!((last(&args, "x"), last(&args, "model"), is_set(&args, "c")), (None, None, true));
        assert_eq!(set(&args, &["a", "x", "a-b"]), ["a=1", "a-b=4"]);
    }
}
