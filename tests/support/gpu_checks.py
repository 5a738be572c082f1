"""``python -m tests.support.gpu_checks NAME RESULT FOLDER``: checks that behave badly, as libraries can."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    name, result, folder = sys.argv[1:]
    if name == "hangs":
        child = subprocess.Popen(["sleep", "600"])
        Path(os.environ["GPU_CHECKS_PID"]).write_text(str(child.pid))
        time.sleep(600)
    if name == "aborts":
        print("the library's last words", flush=True)
        os.abort()
    Path(result).write_text(json.dumps({"status": "ok", "figures": {"gb": 1}, "text": ""}))
