//! Virtualisation by the processor.

/// Whether the processor offers virtualisation (vmx or svm): without it guests under KVM only crawl.
pub fn has_virtualisation() -> bool {
    let described = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = described.lines().find_map(|line| line.strip_prefix("flags"));
    flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm"))
}

/// Whether this user's QEMU can use KVM.
///
/// # Errors
/// Why not.
pub fn kvm_works() -> Result<(), &'static str> {
    if std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_err() {
        return Err("/dev/kvm cannot be opened");
    }
    if has_virtualisation() {
        Ok(())
    } else {
        Err("the processor does not offer virtualisation (vmx or svm)")
    }
}
