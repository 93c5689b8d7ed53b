//@ name graph_hops_from_first_node
//@ size 30000
//@ prompt
/* Store in hops the least number of edges on a way from node 0 to each node, or -1 for a node without a way.
   The neighbors of node i are neighbors[k], for k from first[i] up to first[i+1]-1; each edge is listed at both ends.
{model}   Example:

   input: first = [0, 1, 3, 4, 4], neighbors = [1, 0, 2, 1]
   output: hops = [0, 1, 2, -1]
*/
void countHops(std::vector<size_t> const& first, std::vector<size_t> const& neighbors, std::vector<int> &hops) {
//@ serial
    std::fill(hops.begin(), hops.end(), -1);
    std::vector<size_t> reached{0};
    hops[0] = 0;
    for (size_t at = 0; at < reached.size(); at += 1) {
        const size_t node = reached[at];
        for (size_t k = first[node]; k < first[node + 1]; k += 1) {
            if (hops[neighbors[k]] < 0) {
                hops[neighbors[k]] = hops[node] + 1;
                reached.push_back(neighbors[k]);
            }
        }
    }
}
//@ omp
    const size_t nodes = hops.size();
    #pragma omp parallel for
    for (size_t i = 0; i < nodes; i += 1) hops[i] = i == 0 ? 0 : -1;
    bool grows = true;
    for (int level = 0; grows; level += 1) {
        grows = false;
        std::vector<char> joins(nodes, 0);
        #pragma omp parallel for reduction(|| : grows) schedule(dynamic, 512)
        for (size_t i = 0; i < nodes; i += 1) {
            if (hops[i] >= 0) continue;
            for (size_t k = first[i]; k < first[i + 1]; k += 1) {
                if (hops[neighbors[k]] == level) {
                    joins[i] = 1;
                    grows = true;
                    break;
                }
            }
        }
        #pragma omp parallel for
        for (size_t i = 0; i < nodes; i += 1) {
            if (joins[i]) hops[i] = level + 1;
        }
    }
}
//@ driver
struct Case {
    std::vector<size_t> first, neighbors;
    std::vector<int> hops;
};

Case draw(size_t size, Random &random) {
    std::vector<std::vector<size_t>> lists(size);
    for (size_t edge = 0; edge < 2 * size; edge += 1) {
        const size_t a = whole(random, 0, size - 1), b = whole(random, 0, size - 1);
        lists[a].push_back(b);
        lists[b].push_back(a);
    }
    Case made;
    made.first.push_back(0);
    for (auto const &list : lists) {
        made.neighbors.insert(made.neighbors.end(), list.begin(), list.end());
        made.first.push_back(made.neighbors.size());
    }
    made.hops.assign(size, 7);
    return made;
}

void sample(Case &c) { countHops(c.first, c.neighbors, c.hops); }
void best(Case &c) { reference::countHops(c.first, c.neighbors, c.hops); }
bool same(Case const &got, Case const &wanted) { return got.hops == wanted.hops; }
