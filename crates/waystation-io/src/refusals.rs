//! System calls that the tests of this crate have refused, as a sandbox does.

use std::io;

/// Has the system answer calls of this thread, and of threads that it starts from now on, with `errno`. There is
/// no way back: a test calls this in a thread of its own.
pub fn refuse(calls: &[libc::c_long], errno: i32) {
    let load_number = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let mut filter = vec![instruction(load_number, 0, 0)];
    for (index, &call) in calls.iter().enumerate() {
        let to_refusal = (calls.len() - index) as u8;
        filter.push(instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call as u32, to_refusal));
    }
    filter.push(instruction(libc::BPF_RET, libc::SECCOMP_RET_ALLOW, 0));
    filter.push(instruction(libc::BPF_RET, libc::SECCOMP_RET_ERRNO | errno as u32, 0));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program refers to the filter, which lives until the kernel has copied it.
    let outcomes = unsafe {
        [
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program),
        ]
    };
    assert_eq!(outcomes, [0, 0], "no filter of system calls: {}", io::Error::last_os_error());
}

/// Runs `body` in a thread that ends before this returns.
pub fn in_a_thread(body: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        if let Err(panic) = scope.spawn(body).join() {
            std::panic::resume_unwind(panic);
        }
    });
}

fn instruction(code: u32, k: u32, jump_if_equal: u8) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: jump_if_equal, jf: 0, k }
}
