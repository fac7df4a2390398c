//! The program `waystation-agent`: what it does is `waystation_agent::daemon`.

use std::process::ExitCode;

fn main() -> ExitCode {
    waystation_agent::daemon::main(std::env::args_os().skip(1))
}
