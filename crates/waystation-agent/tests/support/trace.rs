//! A process that is killed before the n-th of its changes of files.

use std::mem::{MaybeUninit, size_of};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::null_mut;

/// What became of a traced process.
pub enum End {
    /// It was killed before the change that was asked for.
    Killed,
    /// It ended by itself, after so many changes.
    Exited { status: i32, changes: usize },
}

/// Runs a command of one thread, and kills it when it is about to make change number `limit`.
pub fn run(command: &mut Command, limit: usize) -> End {
    // SAFETY: between fork and exec this makes one system call and touches no memory.
    unsafe {
        command.pre_exec(|| {
            match libc::ptrace(libc::PTRACE_TRACEME, 0, null_mut::<u8>(), null_mut::<u8>()) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    let process = command.spawn().unwrap().id() as i32;
    let mut status = wait(process);
    assert!(libc::WIFSTOPPED(status), "not stopped at its start");
    let options = libc::PTRACE_O_EXITKILL | libc::PTRACE_O_TRACESYSGOOD;
    trace(libc::PTRACE_SETOPTIONS, process, 0, options as usize);
    let mut changes = 0;
    let mut signal = 0;
    loop {
        trace(libc::PTRACE_SYSCALL, process, 0, signal);
        status = wait(process);
        if libc::WIFEXITED(status) {
            return End::Exited { status: libc::WEXITSTATUS(status), changes };
        }
        assert!(libc::WIFSTOPPED(status), "it ended by signal {}", libc::WTERMSIG(status));
        signal = 0;
        if libc::WSTOPSIG(status) != libc::SIGTRAP | 0x80 {
            signal = libc::WSTOPSIG(status) as usize;
        } else if enters_change(process) {
            if changes == limit {
                // SAFETY: the process is a child that nobody has waited for.
                assert_eq!(unsafe { libc::kill(process, libc::SIGKILL) }, 0);
                assert!(libc::WIFSIGNALED(wait(process)));
                return End::Killed;
            }
            changes += 1;
        }
    }
}

fn enters_change(process: i32) -> bool {
    let mut info = MaybeUninit::<libc::ptrace_syscall_info>::zeroed();
    let size = size_of::<libc::ptrace_syscall_info>();
    trace(libc::PTRACE_GET_SYSCALL_INFO, process, size, info.as_mut_ptr() as usize);
    // SAFETY: zeros are a valid value, and the call has filled in what there is.
    let info = unsafe { info.assume_init() };
    if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return false;
    }
    // SAFETY: at an entry that is the member in use.
    let entry = unsafe { info.u.entry };
    let makes_file = || entry.args[2] & libc::O_CREAT as u64 != 0;
    match entry.nr as libc::c_long {
        libc::SYS_openat => makes_file(),
        libc::SYS_pwrite64 | libc::SYS_renameat2 | libc::SYS_unlinkat | libc::SYS_fallocate => true,
        _ => false,
    }
}

fn trace(request: libc::c_uint, process: i32, address: usize, data: usize) {
    // SAFETY: requests that write, write to memory that `data` was taken from, and no more than was said.
    let done = unsafe { libc::ptrace(request, process, address, data) };
    assert!(done >= 0, "{}", std::io::Error::last_os_error());
}

fn wait(process: i32) -> i32 {
    let mut status = 0;
    // SAFETY: the call writes to the status, which outlives it.
    assert_eq!(unsafe { libc::waitpid(process, &raw mut status, 0) }, process);
    status
}
