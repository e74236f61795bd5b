from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model

config = get_config_from_spec("mini.yaml")
config["model"]["cost_tracking"] = "ignore_errors"
agent = DefaultAgent(get_model("openai/policy", config["model"]), LocalEnvironment(), **config["agent"])
print(agent.run("Add 1 and 2, then 3 and 4.")["submission"])
