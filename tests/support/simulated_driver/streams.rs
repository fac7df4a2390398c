//! Streams, each a thread, and events on them. A failure stays with its stream, as with a real driver.

use std::collections::HashMap;
use std::ffi::c_uint;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};

use crate::{INVALID_VALUE, NO_CONTEXT, NOT_READY, SUCCESS, Status, has_context};

/// What a stream does.
pub type Work = Box<dyn FnOnce() -> Status + Send>;

struct Stream {
    work: Sender<Work>,
    thread: Option<std::thread::JoinHandle<()>>,
    status: Arc<Mutex<Status>>,
}

type Event = Arc<(Mutex<(u64, u64, Status)>, Condvar)>; // recorded, reached, the status then

static STREAMS: Mutex<Option<HashMap<usize, Stream>>> = Mutex::new(None);
static EVENTS: Mutex<Option<HashMap<usize, Event>>> = Mutex::new(None);
static NEXT: AtomicUsize = AtomicUsize::new(1);

/// Has a stream do something after all that it was given before.
pub fn enqueue(stream: usize, work: Work) -> Status {
    if !has_context() {
        return NO_CONTEXT;
    }
    match STREAMS.lock().unwrap().get_or_insert_default().get(&stream) {
        Some(stream) => stream.work.send(work).map_or(INVALID_VALUE, |()| SUCCESS),
        None => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut usize, _flags: c_uint) -> Status {
    if !has_context() {
        return NO_CONTEXT;
    }
    let (work, queue) = channel::<Work>();
    let status = Arc::new(Mutex::new(SUCCESS));
    let own = Arc::clone(&status);
    let thread = std::thread::spawn(move || {
        for work in queue {
            let outcome = work();
            if outcome != SUCCESS {
                *own.lock().unwrap() = outcome;
            }
        }
    });
    let handle = NEXT.fetch_add(1, Ordering::SeqCst);
    let made = Stream { work, thread: Some(thread), status };
    STREAMS.lock().unwrap().get_or_insert_default().insert(handle, made);
    unsafe { *stream = handle };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(stream: usize) -> Status {
    let (done, all) = channel();
    let status = enqueue(
        stream,
        Box::new(move || {
            let _ = done.send(());
            SUCCESS
        }),
    );
    if status == SUCCESS { all.recv().map_or(INVALID_VALUE, |()| SUCCESS) } else { status }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(stream: usize) -> Status {
    let Some(mut stream) = STREAMS.lock().unwrap().get_or_insert_default().remove(&stream) else {
        return INVALID_VALUE;
    };
    drop(stream.work);
    stream.thread.take().map(|thread| thread.join());
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut usize, _flags: c_uint) -> Status {
    let handle = NEXT.fetch_add(1, Ordering::SeqCst);
    EVENTS.lock().unwrap().get_or_insert_default().insert(handle, Event::default());
    unsafe { *event = handle };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: usize, stream: usize) -> Status {
    let Some(event) = EVENTS.lock().unwrap().get_or_insert_default().get(&event).cloned() else {
        return INVALID_VALUE;
    };
    let Some(status) =
        STREAMS.lock().unwrap().get_or_insert_default().get(&stream).map(|own| Arc::clone(&own.status))
    else {
        return INVALID_VALUE;
    };
    event.0.lock().unwrap().0 += 1;
    let reach = move || {
        let mut state = event.0.lock().unwrap();
        state.1 += 1;
        state.2 = *status.lock().unwrap();
        event.1.notify_all();
        SUCCESS
    };
    enqueue(stream, Box::new(reach))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventSynchronize(event: usize) -> Status {
    let Some(event) = EVENTS.lock().unwrap().get_or_insert_default().get(&event).cloned() else {
        return INVALID_VALUE;
    };
    let mut state = event.0.lock().unwrap();
    while state.1 < state.0 {
        state = event.1.wait(state).unwrap();
    }
    state.2
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(event: usize) -> Status {
    let Some(event) = EVENTS.lock().unwrap().get_or_insert_default().get(&event).cloned() else {
        return INVALID_VALUE;
    };
    let state = event.0.lock().unwrap();
    if state.1 < state.0 { NOT_READY } else { state.2 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: usize) -> Status {
    EVENTS.lock().unwrap().get_or_insert_default().remove(&event).map_or(INVALID_VALUE, |_| SUCCESS)
}
