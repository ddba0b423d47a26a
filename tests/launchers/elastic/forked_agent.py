"""The agent of `tests.launchers.elastic.forked_node`, as the launcher calls it by -c."""

from accbench.launchers.elastic import agent

if __name__ == "__main__":
    agent.main()
