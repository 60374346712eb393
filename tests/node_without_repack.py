"""rollout.py with vLLM's own weight reload, unmended: what the probe has to catch. Workers import this file too."""

import rollout

rollout.repack = lambda model: None

if __name__ == "__main__":
    rollout.main()
