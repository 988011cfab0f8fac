use super::*;

fn new(tree: &FileTree, parent: FileId, name: &str, kind: FileKind) -> (FileTree, FileId) {
    let (tree, entry) = tree.with_new(parent, name, kind, 0o644, None, 7).unwrap();
    (tree, entry.id)
}

fn kind_of<T>(result: Result<T>) -> ErrorKind {
    result.err().expect("it was refused").kind()
}

/// `a` and `b` are files, `folder` holds `inner`.
fn sample() -> (FileTree, FileId, FileId) {
    let (tree, a) = new(&FileTree::default(), FileId::ROOT, "a", FileKind::Small);
    let (tree, _) = new(&tree, FileId::ROOT, "b", FileKind::Small);
    let (tree, folder) = new(&tree, FileId::ROOT, "folder", FileKind::Folder);
    let (tree, _) = new(&tree, folder, "inner", FileKind::Small);
    (tree, a, folder)
}

fn names(tree: &FileTree, folder: FileId) -> Vec<String> {
    tree.entries(folder).map(|entry| entry.name.clone()).collect()
}

#[test]
fn a_tree_survives_its_document() {
    let (tree, a, folder) = sample();
    let again = FileTree::decode(&tree.encode().unwrap()).unwrap();
    assert_eq!(names(&again, FileId::ROOT), ["a", "b", "folder"]);
    assert_eq!(names(&again, folder), ["inner"]);
    assert_eq!(again.get(a), tree.get(a));
    assert_eq!(again.of_number(a.number()).unwrap().name, "a");
    assert_eq!(again.changed_ns(FileId::ROOT), tree.changed_ns(FileId::ROOT));
    assert_eq!(again.path(again.find(folder, "inner").unwrap()), "folder/inner");
}

#[test]
fn a_rename_replaces_an_existing_file() {
    let (tree, a, _) = sample();
    let root = FileId::ROOT;
    let (after, replaced) = tree.renamed((root, "a"), (root, "b"), 9).unwrap().unwrap();
    assert_eq!(replaced.unwrap().name, "b");
    assert_eq!(after.find(root, "b").unwrap().id, a, "the file keeps its id");
    assert_eq!(names(&after, root), ["b", "folder"]);
    assert!(after.changed_ns(root) > tree.changed_ns(root));
    assert!(tree.renamed((root, "a"), (root, "a"), 9).unwrap().is_none());
}

#[test]
fn invalid_renames_are_refused() {
    let (tree, _, folder) = sample();
    let root = FileId::ROOT;
    let rename = |from, to| tree.renamed(from, to, 9);
    assert_eq!(kind_of(rename((root, "none"), (root, "x"))), ErrorKind::NotFound);
    assert_eq!(kind_of(rename((root, "a"), (root, "folder"))), ErrorKind::IsAFolder);
    assert_eq!(kind_of(rename((root, "folder"), (root, "a"))), ErrorKind::NotAFolder);
    assert_eq!(kind_of(rename((root, "folder"), (folder, "x"))), ErrorKind::InvalidInput);
    assert_eq!(kind_of(rename((root, "a"), (root, ".."))), ErrorKind::InvalidInput);
    let (tree, _) = new(&tree, root, "empty", FileKind::Folder);
    let full = tree.renamed((root, "empty"), (root, "folder"), 9);
    assert_eq!(kind_of(full), ErrorKind::NotEmpty);
    let (after, _) = tree.renamed((root, "folder"), (root, "empty"), 9).unwrap().unwrap();
    assert_eq!(names(&after, folder), ["inner"], "what is in a folder goes along");
}

#[test]
fn removal_checks_the_kind_and_refuses_full_folders() {
    let (tree, _, folder) = sample();
    let root = FileId::ROOT;
    let remove = |name, what| tree.without(root, name, what, 9);
    assert_eq!(kind_of(remove("folder", Removal::Any)), ErrorKind::NotEmpty);
    assert_eq!(kind_of(remove("folder", Removal::File)), ErrorKind::IsAFolder);
    assert_eq!(kind_of(remove("a", Removal::Folder)), ErrorKind::NotAFolder);
    assert_eq!(kind_of(remove("none", Removal::Any)), ErrorKind::NotFound);
    let (after, _) = tree.without(folder, "inner", Removal::File, 9).unwrap();
    let (after, gone) = after.without(root, "folder", Removal::Folder, 9).unwrap();
    assert_eq!((names(&after, root), gone.id), (vec!["a".to_owned(), "b".into()], folder));
    assert_eq!(
        kind_of(after.with_new(folder, "x", FileKind::Small, 0, None, 9)),
        ErrorKind::NotFound
    );
}

#[test]
fn names_have_bounds() {
    let root = FileId::ROOT;
    let make = |name: &str| FileTree::default().with_new(root, name, FileKind::Small, 0, None, 1);
    for name in ["", ".", "..", "a/b", "a\0b"] {
        assert_eq!(kind_of(make(name)), ErrorKind::InvalidInput, "{name:?}");
    }
    assert_eq!(kind_of(make(&"n".repeat(256))), ErrorKind::NameTooLong);
    for name in [".lck-0123456789abcdef", "Größe (1).vmx~", &"n".repeat(255)] {
        make(name).unwrap();
    }
}

#[test]
fn folders_and_files_have_a_limit() {
    let (mut tree, mut folder) = (FileTree::default(), FileId::ROOT);
    for _ in 0..MAX_DEPTH {
        (tree, folder) = new(&tree, folder, "deeper", FileKind::Folder);
    }
    let deeper = tree.with_new(folder, "deeper", FileKind::Folder, 0, None, 1);
    assert_eq!(kind_of(deeper), ErrorKind::NameTooLong);
    let (one, _) = new(&FileTree::default(), FileId::ROOT, "top", FileKind::Folder);
    let top = one.find(FileId::ROOT, "top").unwrap().id;
    let mut full = one;
    for number in full.len()..MAX_CLIENT_FILES {
        let mut entry = FileEntry::clone(full.get(top).unwrap());
        entry.id = full.free_id().unwrap();
        (entry.parent, entry.name) = (top, format!("file {number}"));
        full.put(Arc::new(entry));
    }
    let full = FileTree::decode(&full.encode().unwrap()).unwrap();
    assert_eq!(full.len(), MAX_CLIENT_FILES);
    let more = full.with_new(FileId::ROOT, "one more", FileKind::Small, 0, None, 1);
    assert_eq!(kind_of(more), ErrorKind::NoSpace);
    let (less, _) = full.without(top, "file 77", Removal::Any, 2).unwrap();
    less.with_new(FileId::ROOT, "one more", FileKind::Small, 0, None, 3).unwrap();
}

#[test]
fn a_document_that_contradicts_itself_is_corrupt() {
    let (tree, _, folder) = sample();
    let text = String::from_utf8(tree.encode().unwrap()).unwrap();
    let twice = text.replace("\"name\":\"b\"", "\"name\":\"a\"");
    assert_eq!(kind_of(FileTree::decode(twice.as_bytes())), ErrorKind::Corrupt);
    let parent = format!("\"parent\":\"{}\"", folder.0);
    let lost = text.replace(&parent, &format!("\"parent\":\"{}\"", "7".repeat(32)));
    assert_eq!(kind_of(FileTree::decode(lost.as_bytes())), ErrorKind::Corrupt);
    assert_eq!(kind_of(FileTree::decode(b"{}")), ErrorKind::Corrupt);
}
