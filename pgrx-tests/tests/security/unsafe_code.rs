//! Where `unsafe` may stand: in src/pg/, with the reason beside it.

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The Rust files below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder can be read") {
        let path = entry.expect("an entry can be read").path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// What a line holds outside comments and literals.
fn code(line: &str) -> String {
    let line = line.split("//").next().unwrap_or_default();
    line.split('"').step_by(2).collect()
}

fn is_unsafe(line: &str) -> bool {
    code(line)
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .any(|word| word == "unsafe")
}

/// Whether the comment that belongs to a line gives the reason: the one before its statement, or the documentation of a function.
fn is_explained(lines: &[&str], index: usize) -> bool {
    let above = lines[..index].iter().rev();
    let near = above.take_while(|line| !line.trim().is_empty()).take(12);
    let explained = near
        .clone()
        .any(|line| line.contains("// SAFETY:") || line.contains("/// # Safety"));
    // What Postgres alone calls has its conditions in Postgres.
    let called_back = lines[index].contains("unsafe extern \"C-unwind\"")
        || lines[index].contains("= unsafe extern");
    explained || called_back
}

#[test]
fn stands_in_one_place_and_says_why() {
    let root = root();
    let mut seen = 0;
    let mut astray = Vec::new();
    for folder in ["src", "pgrx-tests"] {
        for path in sources(&root.join(folder)) {
            let name = path.strip_prefix(&root).expect("it lies below").to_owned();
            let text = fs::read_to_string(&path).expect("a source is text");
            let lines: Vec<_> = text.lines().collect();
            for (index, line) in lines.iter().enumerate().filter(|(_, line)| is_unsafe(line)) {
                // An attribute on the entries that the server finds by name.
                if line.trim() == "#[unsafe(no_mangle)]" && name == Path::new("src/worker/mod.rs") {
                    continue;
                }
                if name.starts_with("src/pg") && is_explained(&lines, index) {
                    seen += 1;
                } else {
                    astray.push(format!("{}:{}: {}", name.display(), index + 1, line.trim()));
                }
            }
        }
    }
    assert_eq!(astray, Vec::<String>::new());
    assert!(seen > 50, "only {seen} were found");
}
