"""The tuner's own time: per trial up to 2,000 trials, and as a share of a 200-trial run of native-engine length.

Trials are answered by the fake engine's formula, so that nothing but the tuner takes time: asking, learning and storing.
The share is of the --trial-seconds that a trial of the native engine takes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from autotune.runtimes.fake import FACTS, NATIVE
from autotune.sampler import Sampler
from search_spaces import Space, load
from tuning_db import Hardware, Scenario, Store, Trial, new_id
