//! Documents: how long they are, and that what they name exists.

use super::*;

/// Documents for users, in which a cell of a table is a phrase and flags are those that there are.
const FOR_USERS: [&str; 4] = ["BENCHMARKS.md", "MODELS.md", "README.md", "SERVER.md"];

/// Lines and bytes of README: a reader wants to run a model in five minutes.
const MAX_README: (usize, usize) = (250, 16 * 1024);
/// Lines of CHANGELOG, one fact each.
const MAX_CHANGELOG_LINES: usize = 80;
/// Characters of a cell of a table.
pub(crate) const MAX_CELL: usize = 200;

/// Flags of other programs that the documents name.
const FOREIGN_FLAGS: &[(&str, &[&str])] = &[
    ("cargo", &["--bench", "--nocapture", "--path", "--release", "--test"]),
    (
        "dynamo",
        &["--discovery-backend", "--event-plane", "--migration-limit", "--model-path", "--router-mode"],
    ),
    ("litellm", &["--config"]),
    ("pip", &["--no-deps"]),
    (
        "vllm-router, smg",
        &[
            "--kv-event-block-size",
            "--kv-event-model",
            "--kv-event-replay-source",
            "--kv-event-source",
            "--policy",
            "--worker-urls",
        ],
    ),
];

fn document(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Cells of tables that are too long, with their lines.
pub(crate) fn long_cells(text: &str) -> Vec<(usize, usize)> {
    let rows = text.lines().enumerate().filter(|(_, line)| line.starts_with('|'));
    let cells = rows.flat_map(|(index, row)| row.split('|').map(move |cell| (index + 1, cell.trim())));
    cells.map(|(line, cell)| (line, cell.chars().count())).filter(|(_, len)| *len > MAX_CELL).collect()
}

/// The text without what is between fences, where brackets and marks mean something else.
fn prose(text: &str) -> String {
    let mut in_code = false;
    let mut prose = String::new();
    for line in text.lines() {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        if !in_code && !is_fence {
            prose.push_str(line);
        }
        prose.push('\n');
    }
    prose
}

/// Targets of links that are no addresses, with their lines.
pub(crate) fn links(text: &str) -> Vec<(usize, String)> {
    let prose = prose(text);
    let lines = prose.lines().enumerate();
    let targets = lines.flat_map(|(index, line)| line.split("](").skip(1).map(move |rest| (index + 1, rest)));
    targets
        .filter_map(|(line, rest)| Some((line, rest.split_once(')')?.0.to_owned())))
        .filter(|(_, target)| !target.contains("://") && !target.starts_with("mailto:"))
        .collect()
}

/// Names by which headings are linked: in small letters, without punctuation, with `-` for spaces.
pub(crate) fn anchors(text: &str) -> Vec<String> {
    let prose = prose(text);
    let headings = prose.lines().filter_map(|line| {
        let title = line.trim_start_matches('#');
        (title.len() < line.len()).then(|| title.trim().to_lowercase())
    });
    let kept = |c: char| match c {
        ' ' => Some('-'),
        c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
        _ => None,
    };
    headings.map(|title| title.chars().filter_map(kept).collect()).collect()
}

/// Long flags in a text, with their lines.
pub(crate) fn flags(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for (start, mark) in line.match_indices("--") {
            let before = line[..start].chars().next_back();
            let name: String = line[start + mark.len()..]
                .chars()
                .take_while(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || *c == '-')
                .collect();
            let begins = before.is_none_or(|c| c.is_whitespace() || "`([|\"'".contains(c));
            if begins && name.starts_with(|c: char| c.is_ascii_lowercase()) {
                found.push((index + 1, format!("--{}", name.trim_end_matches('-'))));
            }
        }
    }
    found
}

#[test]
fn documents_for_users_are_short() {
    let readme = document("README.md");
    let (lines, bytes) = (readme.lines().count(), readme.len());
    let (max_lines, max_bytes) = MAX_README;
    assert!(
        lines <= max_lines && bytes <= max_bytes,
        "README has at most {max_lines} lines and {max_bytes} bytes, and it has {lines} and {bytes}: move details to \
         MODELS.md or SERVER.md"
    );
    let changelog = document("CHANGELOG.md").lines().count();
    assert!(
        changelog <= MAX_CHANGELOG_LINES,
        "CHANGELOG has at most {MAX_CHANGELOG_LINES} lines, and it has {changelog}: say what a user gets, and leave \
         details to SERVER.md, MODELS.md or BENCHMARKS.md"
    );
    none(
        &format!(
            "a cell of a table has at most {MAX_CELL} characters; what needs more is a section with a list"
        ),
        FOR_USERS.iter().chain(&["ARCHITECTURE.md", "CONTRIBUTING.md", "KERNELS.md"]).flat_map(|name| {
            long_cells(&document(name)).into_iter().map(move |(line, len)| format!("{name}:{line}: {len}"))
        }),
    );
}

#[test]
fn links_in_documents_lead_somewhere() {
    let documents: Vec<String> = tracked_files()
        .into_iter()
        .filter(|name| name.ends_with(".md") && !name.starts_with("tests/"))
        .collect();
    assert!(documents.len() > 8, "only {documents:?} found");
    let mut broken = Vec::new();
    let mut num_links = 0;
    for name in &documents {
        for (line, target) in links(&document(name)) {
            num_links += 1;
            let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let folder = Path::new(name).parent().unwrap_or(Path::new(""));
            let path = if file.is_empty() { PathBuf::from(name) } else { folder.join(file) };
            let is_there = root().join(&path).exists();
            let has_anchor =
                || anchors(&fs::read_to_string(root().join(&path)).unwrap()).iter().any(|own| own == anchor);
            if !is_there || (!anchor.is_empty() && !has_anchor()) {
                broken.push(format!("{name}:{line}: {target}"));
            }
        }
    }
    assert!(num_links > 50, "only {num_links} links found");
    none("a link leads to a file, and to a heading in it", broken);
}

#[test]
fn flags_in_documents_exist() {
    let commands = subcommands();
    let mut pages = vec![help(&[]), help(&["bench", "serve"])];
    pages.extend(commands.iter().map(|name| help(&[name])));
    let mut own: Vec<String> = pages.iter().flat_map(|page| flags(page)).map(|(_, flag)| flag).collect();
    // As users of other programs type them, and where clap has one spelling more.
    let elsewhere = document("src/cli/elsewhere.rs");
    let table = elsewhere.split_once("const FLAGS").unwrap().1.split_once("\n];").unwrap().0;
    own.extend(flags(table).into_iter().map(|(_, flag)| flag));
    for name in tracked_files().iter().filter(|name| name.starts_with("src/cli/") && name.ends_with(".rs")) {
        let definitions = document(name);
        let aliases = definitions.split(", alias = \"").skip(1).filter_map(|rest| rest.split_once('"'));
        own.extend(aliases.map(|(alias, _)| format!("--{alias}")));
    }
    let foreign: Vec<&str> = FOREIGN_FLAGS.iter().flat_map(|(_, flags)| *flags).copied().collect();

    let mut scripts = Vec::new();
    for name in tracked_files().iter().filter(|name| name.starts_with("scripts/") && name.ends_with(".py")) {
        scripts.extend(flags(&document(name)).into_iter().map(|(_, flag)| flag));
    }
    let mut unknown = Vec::new();
    let mut named = Vec::new();
    for name in FOR_USERS {
        let text = document(name);
        let lines: Vec<&str> = text.lines().collect();
        for (line, flag) in flags(&text) {
            // A script's flags count in a paragraph, a table or a block of code that names one.
            let before = lines[..line].iter().rev().take_while(|line| !line.is_empty());
            let mut block = before.chain(lines[line..].iter().take_while(|line| !line.is_empty()));
            let mut is_of_script = || scripts.contains(&flag) && block.any(|line| line.contains("scripts/"));
            let is_known = own.contains(&flag) || foreign.contains(&flag.as_str());
            if !is_known && !is_of_script() {
                unknown.push(format!("{name}:{line}: {flag}"));
            }
            named.push(flag);
        }
    }
    none("a flag that a document names is the program's, or one of FOREIGN_FLAGS", unknown);
    none(
        "FOREIGN_FLAGS has flags that documents name",
        foreign.iter().filter(|flag| !named.iter().any(|name| name == **flag)).map(|flag| (*flag).to_owned()),
    );
}
